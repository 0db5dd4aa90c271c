"""Mixes and settings in words."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Groups that a mix names one by one; more are counted.
_NUM_NAMED = 3


def describe_mix(formats: Mapping[str, str]) -> str:
    """A mix in words: the format that most groups have, and the groups that differ."""
    if not formats:
        return ""
    (most, _), *others = Counter(formats.values()).most_common()
    if not others:
        return f"all {most}"
    exceptions = [f"{group}: {name}" for group, name in formats.items() if name != most]
    named, rest = exceptions[:_NUM_NAMED], len(exceptions) - _NUM_NAMED
    return f"{most}; " + ", ".join(named) + (f" and {rest} more" if rest > 0 else "")


def describe_shares(formats: Mapping[str, str], groups: Sequence[Mapping[str, Any]]) -> str:
    """Which part of the FLOPs has which format, such as ``bf16 93%, fp32 7%``; empty where no group counts any."""
    share: Counter[str] = Counter()
    for group in groups:
        share[formats.get(group["name"], "fp32")] += group["flops_share"]
    whole = sum(share.values())
    return ", ".join(
        f"{name} {part / whole:.0%}" for name, part in share.most_common() if whole and part / whole > 5e-3
    )


def describe_settings(*settings: Mapping[str, Any]) -> str:
    """Settings in words, without those that say how something is switched on."""
    return ", ".join(
        f"{name.replace('_', ' ')} {_shown(value)}" for name, value in _flat(settings) if value is not True
    )


def _flat(settings: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, Any]]:
    for mapping in settings:
        for name, value in mapping.items():
            yield from _flat([value]) if isinstance(value, Mapping) else [(name, value)]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
