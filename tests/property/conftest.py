"""Puts the grammar on the path, and the checks, which are those that the zoo's models must pass."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "zoo")]
