"""Which families a model belongs to, and which of its sites they keep high."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from autoprec.rulebook.rules import Family, FamilyRule, Rulebook

#: A container with fewer blocks has no inside: its first and last block are most of the model.
MIN_BLOCKS = 4


class FamilySite(Protocol):
    """A site, as far as families need to know it."""

    @property
    def module(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def is_gemm(self) -> bool: ...


S = TypeVar("S", bound=FamilySite)


def families_of(rulebook: Rulebook, class_names: Iterable[str], ops: Iterable[str]) -> tuple[Family, ...]:
    """The families of a model.

    Args:
        rulebook: as loaded.
        class_names: of every module, repeats included.
        ops: canonical name of every site's op, repeats included; empty where nothing was recorded.
    """
    class_names, ops = tuple(class_names), tuple(ops)
    return tuple(
        family
        for family in rulebook.families.values()
        if sum(_any_glob(name, family.classes) for name in class_names) >= family.min_sites
        or sum(op in family.ops for op in ops) >= family.min_sites
    )


def kept_sites(family: Family, sites: Sequence[S], classes: Mapping[str, str]) -> list[tuple[S, FamilyRule]]:
    """The sites that a family keeps high, each with its strictest rule: fp32 before 16 bit.

    Args:
        family: of the model.
        sites: in order of execution.
        classes: full name of every module → its class name.
    """
    kept: dict[int, tuple[S, FamilyRule]] = {}
    for rule in family.keep:
        for site in _picked(rule, sites, classes):
            have = kept.get(id(site))
            if have is None or (rule.precision == "fp32" and have[1].precision != "fp32"):
                kept[id(site)] = (site, rule)
    return [kept[id(site)] for site in sites if id(site) in kept]


def _picked(rule: FamilyRule, sites: Sequence[S], classes: Mapping[str, str]) -> list[S]:
    picked = [site for site in sites if _satisfies(rule, site, classes)]
    if rule.position in ("first", "last"):
        gemms = [site for site in picked if site.is_gemm]
        return gemms[:1] if rule.position == "first" else gemms[-1:]
    if rule.position:
        blocks = _outer_blocks(classes, last=rule.position == "last_block")
        return [site for site in picked if any(_inside(site.module, block) for block in blocks)]
    return picked


def _satisfies(rule: FamilyRule, site: FamilySite, classes: Mapping[str, str]) -> bool:
    if rule.ops and site.op not in rule.ops:
        return False
    if rule.names and not _any_glob(site.module, rule.names):
        return False
    return not rule.classes or any(_any_glob(classes.get(name, ""), rule.classes) for name in _around(site.module))


def _around(module: str) -> list[str]:
    """The module's own full name and those of all modules around it, the root ``""`` included."""
    parts = module.split(".") if module else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _outer_blocks(modules: Iterable[str], *, last: bool) -> list[str]:
    """First or last entry of every outermost numbered container with at least :data:`MIN_BLOCKS` entries."""
    entries: dict[str, set[int]] = {}
    for name in modules:
        parts = name.split(".")
        number = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            entries.setdefault(".".join(parts[:number]), set()).add(int(parts[number]))
    pick = max if last else min
    return [f"{name}.{pick(numbers)}".lstrip(".") for name, numbers in entries.items() if len(numbers) >= MIN_BLOCKS]


def _inside(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")


def _any_glob(text: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, glob) for glob in globs)
