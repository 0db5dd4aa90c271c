"""Durations and shares as people write them."""

import re

from autoprec.errors import UsageError

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e-?\d+)?"


def parse_duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``15m`` or ``1.5h``.

    Raises:
        UsageError: anything else, or nothing.
    """
    match = re.fullmatch(rf"(?P<number>{_NUMBER})\s*(?P<unit>[a-z]*)", text.strip())
    if not match or match["unit"] not in _SECONDS or float(match["number"]) == 0:
        raise UsageError(f"{text!r} is no duration; write seconds, or 90s, 15m, 2h")
    return float(match["number"]) * _SECONDS[match["unit"]]


def parse_share(text: str) -> float:
    """A share of 1: ``0.5%`` and ``0.005`` are both 0.005.

    Raises:
        UsageError: anything else, or not between 0 and 1.
    """
    match = re.fullmatch(rf"(?P<number>{_NUMBER})\s*(?P<percent>%?)", text.strip())
    share = float(match["number"]) / (100 if match["percent"] else 1) if match else -1.0
    if not 0 < share < 1:
        raise UsageError(f"{text!r} is no share between 0 and 1; write 0.5% or 0.005")
    return share
