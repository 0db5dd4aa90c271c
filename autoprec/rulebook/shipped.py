"""Where the shipped rule files are."""

from functools import cache
from pathlib import Path

import autoprec
from autoprec.errors import RuleError


@cache
def rules_folder() -> Path:
    """The folder of the shipped rule files: inside the package in a wheel, beside it in a checkout.

    Raises:
        RuleError: neither is there, so that the installation is broken.
    """
    package = Path(autoprec.__file__).parent
    for folder in (package / "_rules", package.parent / "rules"):
        if (folder / "ops.toml").is_file():
            return folder
    raise RuleError(f"no rule files in {package / '_rules'} nor {package.parent / 'rules'}: reinstall autoprec")
