"""Load rule files and check them; a later file wins over an earlier one."""

import fnmatch
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Protocol

from autoprec.errors import RuleError
from autoprec.rulebook.parse import RuleFile, parse_rules
from autoprec.rulebook.rules import Rulebook
from autoprec.rulebook.shipped import rules_folder
from autoprec.rulebook.tomlfile import read_toml

_SHIPPED = ("ops.toml", "families.toml", "scaler.toml")


class HasAliases(Protocol):
    """A site, as far as rules need to know it."""

    @property
    def aliases(self) -> tuple[str, ...]: ...


def load_rulebook(*user_files: str | os.PathLike[str]) -> Rulebook:
    """The shipped rules, overridden by these files; a later file wins.

    A file of one's own says, for example::

        [[site]]                      # a place in the model: goes first in the plan
        match = ["head", "blocks.*.attn::softmax"]
        format = "fp32"               # or input, weight and grad_output, each with its own
        why = "the head's loss moves at bf16"

        [[op]]                        # an op wherever it is called
        names = ["cumsum"]
        kind = "follow"
        why = "our sums are short"

    Args:
        user_files: TOML files with ``[[op]]``, ``[[site]]``, ``[[family]]`` and ``[[scaler]]`` tables.

    Raises:
        RuleError: a file can't be read or used; the message names the file, the key, its value and what is allowed.
    """
    shipped = _shipped_files()
    known = frozenset(op for file in shipped for op in file.ops)
    return _merge([*shipped, *(parse_rules(read_toml(Path(path)), known) for path in user_files)])


def check_rules_match(rulebook: Rulebook, sites: Iterable[HasAliases]) -> None:
    """Check that every user site rule matches a site.

    Args:
        rulebook: as loaded.
        sites: of the model at hand.

    Raises:
        RuleError: a rule matches none; the message names it and the nearest sites.
    """
    aliases = [alias for site in sites for alias in site.aliases]
    for site_rule in rulebook.sites:
        for glob in site_rule.rule.match:
            if not any(fnmatch.fnmatchcase(alias, glob) for alias in aliases):
                raise RuleError(
                    f"{site_rule.file}: [[site]] match = {glob!r} matches none of the model's {len(aliases)} site "
                    f"names; {_nearest(glob, aliases)}"
                )


def _nearest(glob: str, aliases: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(glob, aliases, n=3, cutoff=0.3) or sorted(aliases)[:3]
    return f"near it: {', '.join(near)}" if near else "the model has no sites"


@cache
def _shipped_files() -> tuple[RuleFile, ...]:
    files = [read_toml(rules_folder() / name) for name in _SHIPPED]
    return tuple(parse_rules(file, known=None) for file in files)


def _merge(files: Iterable[RuleFile]) -> Rulebook:
    ops, families, scaler, sites, names = {}, {}, (), (), []
    for file in files:
        ops |= file.ops
        families |= file.families
        scaler = file.scaler or scaler
        sites = (*file.sites, *sites)
        names.append(file.name)
    return Rulebook(ops=ops, families=families, scaler=scaler, sites=sites, files=tuple(names))
