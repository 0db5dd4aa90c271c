"""Puts this folder on the path: a zoo harness runs ``stage.py`` from here, with the same checks as the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
