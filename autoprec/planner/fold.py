"""Many names as few globs that match exactly those names: ``layers.1.up … layers.30.up`` becomes three.

Only digits are folded, into classes (``layers.[1-9].up``, ``layers.[12][0-9].up``, ``layers.30.up``): a ``*`` would
also take names nobody meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SPECIAL = re.compile(r"([*?\[])")
_NUMBER = re.compile(r"[0-9]+")


def literal(name: str) -> str:
    """The glob that matches this name alone."""
    return _SPECIAL.sub(r"[\1]", name)


def fold(names: Iterable[str]) -> tuple[str, ...]:
    """Globs that match the given names and no others."""
    entries = {tuple(literal(part) for part in name.split(".")): None for name in names}
    depth = max((len(parts) for parts in entries), default=0)
    for place in range(depth):
        folded: dict[tuple[str, ...], None] = {}
        runs: dict[tuple[tuple[str, ...], tuple[str, ...]], set[str]] = {}
        for parts in entries:
            if place < len(parts) and _NUMBER.fullmatch(parts[place]):
                runs.setdefault((parts[:place], parts[place + 1 :]), set()).add(parts[place])
            else:
                folded[parts] = None
        for (head, tail), numbers in runs.items():
            folded.update(((*head, glob, *tail), None) for glob in number_globs(numbers))
        entries = folded
    return tuple(".".join(parts) for parts in entries)


def number_globs(numbers: Iterable[str]) -> tuple[str, ...]:
    """Globs over digits that match exactly these strings of digits, shortest numbers first."""
    by_length: dict[int, set[str]] = {}
    for number in numbers:
        by_length.setdefault(len(number), set()).add(number)
    return tuple(glob for length in sorted(by_length) for glob in _same_length(by_length[length]))


def _same_length(numbers: set[str]) -> list[str]:
    """Prefixes that go on with the same digits share one class for their last digit; the prefixes fold in turn."""
    if numbers == {""}:
        return [""]
    last_digits: dict[str, set[str]] = {}
    for number in sorted(numbers):
        last_digits.setdefault(number[:-1], set()).add(number[-1])
    prefixes: dict[str, set[str]] = {}
    for prefix, digits in last_digits.items():
        prefixes.setdefault(_digit_class(digits), set()).add(prefix)
    return [head + digits for digits, heads in prefixes.items() for head in _same_length(heads)]


def _digit_class(digits: set[str]) -> str:
    """``[0-9]`` for all, ``[12]``, ``[0-37]``; a lone digit stands for itself."""
    ordered = sorted(digits)
    if len(ordered) == 1:
        return ordered[0]
    runs: list[list[str]] = []
    for digit in ordered:
        if runs and ord(digit) == ord(runs[-1][-1]) + 1:
            runs[-1].append(digit)
        else:
            runs.append([digit])
    return "[" + "".join("".join(run) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs) + "]"


def grouped(pairs: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    """Reason → names, in order of first appearance, from ``(reason, name)`` pairs."""
    groups: dict[str, list[str]] = {}
    for reason, name in pairs:
        groups.setdefault(reason, []).append(name)
    return groups
