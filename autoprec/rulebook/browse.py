"""Behind ``autoprec rules list | show | test``: what the rules say, as plain values."""

import os
from dataclasses import dataclass

from autoprec.errors import RuleError
from autoprec.rulebook.load import load_rulebook
from autoprec.rulebook.opnames import canonical_op
from autoprec.rulebook.rules import Family, OpRule, Rulebook, SiteRule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """One line of a listing: the table it comes from, its name, what it does, why, source and file."""

    table: str
    name: str
    effect: str
    why: str
    source: str
    file: str


def list_rules(rulebook: Rulebook) -> tuple[RuleRow, ...]:
    """Every rule in force: the user's site rules first, then ops by name, families and scaler priors."""
    sites = [_site_row(site) for site in rulebook.sites]
    ops = [_op_row(rulebook.ops[op]) for op in sorted(rulebook.ops)]
    families = [row for family in rulebook.families.values() for row in _family_rows(family)]
    scaler = [
        RuleRow(
            table="scaler",
            name=f"below {prior.below_params:g} parameters",
            effect=f"scale {prior.settings.init_scale:g}, grows every {prior.settings.growth_interval} steps, "
            f"{prior.settings.min_scale:g} to {prior.settings.max_scale:g}",
            why=prior.why,
            source=prior.source,
            file=prior.file,
        )
        for prior in rulebook.scaler
    ]
    return (*sites, *ops, *families, *scaler)


def show_rule(rulebook: Rulebook, name: str) -> tuple[RuleRow, ...]:
    """The rules of one op or family.

    Raises:
        RuleError: no rule has that name.
    """
    if name in rulebook.families:
        return tuple(_family_rows(rulebook.families[name]))
    op = canonical_op(name.rpartition(".")[2])
    if op in rulebook.ops:
        return (_op_row(rulebook.ops[op]),)
    families = ", ".join(rulebook.families)
    raise RuleError(f"no rule names {name!r}, so it follows its inputs; known: {len(rulebook.ops)} ops and {families}")


def test_rules(*user_files: str | os.PathLike[str]) -> tuple[RuleRow, ...]:
    """Load the files as a conversion would, and give the rules in force that come from them.

    Raises:
        RuleError: a file can't be used.
    """
    rulebook = load_rulebook(*user_files)
    shipped = set(load_rulebook().files)
    return tuple(row for row in list_rules(rulebook) if row.file not in shipped)


def _op_row(rule: OpRule) -> RuleRow:
    effect = " ".join(part for part in (rule.kind, rule.dtype, rule.guard and f"guard={rule.guard}") if part)
    return RuleRow(table="op", name=rule.op, effect=effect, why=rule.why, source=rule.source, file=rule.file)


def _site_row(site: SiteRule) -> RuleRow:
    rule = site.rule
    effect = str(rule.formats) + (f" by {', '.join(rule.backend)}" if rule.backend else "")
    return RuleRow(
        table="site", name=", ".join(rule.match), effect=effect, why=rule.reason, source=rule.source, file=site.file
    )


def _family_rows(family: Family) -> list[RuleRow]:
    rows = []
    for keep in family.keep:
        parts = [("classes", keep.classes), ("names", keep.names), ("ops", keep.ops), ("position", (keep.position,))]
        picks = "; ".join(f"{key} {', '.join(values)}" for key, values in parts if any(values))
        effect = f"{keep.precision}: {picks}"
        rows.append(
            RuleRow(table="family", name=family.name, effect=effect, why=keep.why, source=keep.source, file=family.file)
        )
    return rows
