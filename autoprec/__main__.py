"""``python -m autoprec``."""

from autoprec.cli.app import main

main()
