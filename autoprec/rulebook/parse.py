"""One rule file → checked values.  Names, clashes and rules that can't match are errors."""

import difflib
import math
from dataclasses import dataclass
from typing import cast, get_args

from autoprec.errors import UsageError
from autoprec.formats import FORMATS
from autoprec.plan import FIXED, FOLLOW, Formats, PlanRule, ScalerSettings
from autoprec.rulebook.globs import covers
from autoprec.rulebook.opnames import canonical_op, known_ops
from autoprec.rulebook.rules import (
    Family,
    FamilyRule,
    FixedDtype,
    Guard,
    OpKind,
    OpRule,
    Position,
    Precision,
    ScalerPrior,
    SiteRule,
)
from autoprec.rulebook.tomlfile import Table

_NO_LIMIT = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFile:
    """What one file says."""

    name: str
    ops: dict[str, OpRule]
    families: dict[str, Family]
    scaler: tuple[ScalerPrior, ...]
    sites: tuple[SiteRule, ...]


def parse_rules(top: Table, known: frozenset[str] | None) -> RuleFile:
    """Check one file.

    Args:
        top: the file's top table.
        known: op names to accept beside torch's; None accepts any, for the shipped list itself.

    Raises:
        RuleError: something in it can't be used.
    """
    names = _Names(known)
    file = RuleFile(
        name=top.file,
        ops=_ops(top, names),
        families=_families(top, names),
        scaler=_scaler(top),
        sites=_sites(top, names),
    )
    top.done()
    return file


class _Names:
    """Folds op names and refuses the unknown."""

    def __init__(self, known: frozenset[str] | None) -> None:
        self._known = known

    def op(self, table: Table, key: str, name: str) -> str:
        op = canonical_op(name)
        if self._known is None or op in self._known or op in known_ops():
            return op
        near = difflib.get_close_matches(op, self._known | known_ops(), n=3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise table.error(
            f"{key} = {name!r} isn't an op that torch has (a canonical name such as matmul or layer_norm){hint}"
        )


def _ops(top: Table, names: _Names) -> dict[str, OpRule]:
    rules: dict[str, OpRule] = {}
    for table in top.tables("op"):
        spelled = table.texts("names")
        kind = cast(OpKind, table.choice("kind", get_args(OpKind)))
        dtype = cast(FixedDtype, table.choice("dtype", ("widest", "destination"), ""))
        guard = cast(Guard, table.choice("guard", ("factory", "fill"), ""))
        why, source = table.text("why"), table.text("source", top.file)
        table.done()
        if (kind == "fixed") != bool(dtype):
            raise table.error(f"dtype = {dtype!r} with kind = {kind!r}: fixed needs widest or destination, others none")
        if guard and kind != "follow":
            raise table.error(f"guard = {guard!r} with kind = {kind!r}: only an op that follows has a guard")
        for name in spelled:
            op = names.op(table, "names", name)
            if op in rules:
                raise table.error(f"names {name!r}, which an earlier [[op]] of this file gives kind {rules[op].kind!r}")
            rules[op] = OpRule(op=op, kind=kind, dtype=dtype, guard=guard, why=why, source=source, file=top.file)
    return rules


def _sites(top: Table, names: _Names) -> tuple[SiteRule, ...]:
    rules: list[SiteRule] = []
    for table in top.tables("site"):
        match = table.texts("match")
        formats = _formats(table)
        backend = table.texts("backend", ())
        reason = table.text("why")
        table.done()
        for glob in match:
            if "::" in glob:
                _check_op_glob(table, glob, names)
            for earlier in rules:
                _check_clash(table, glob, formats, earlier)
        rule = PlanRule(match=match, formats=formats, backend=backend, reason=reason, source="user")
        rules.append(SiteRule(rule=rule, file=top.file))
    return tuple(rules)


def _formats(table: Table) -> Formats:
    allowed = (*FORMATS, FOLLOW, FIXED)
    roles = ("input", "weight", "grad_output")
    if table.has("format"):
        clash = [role for role in roles if table.has(role)]
        if clash:
            raise table.error(f"format and {', '.join(clash)}: give one format for all roles, or one for each")
        return Formats.all(table.choice("format", allowed))
    return Formats(**{role: table.choice(role, allowed) for role in roles})


def _check_op_glob(table: Table, glob: str, names: _Names) -> None:
    op = glob.rpartition("::")[2].partition("#")[0]
    if any(wild in op for wild in "*?["):
        return
    canonical = names.op(table, "match", op)
    if canonical != op:
        raise table.error(f"match = {glob!r} can never match: a site calls {op!r} {canonical!r}")


def _check_clash(table: Table, glob: str, formats: Formats, earlier: SiteRule) -> None:
    for other in earlier.rule.match:
        if glob == other and formats != earlier.rule.formats:
            raise table.error(f"match = {glob!r} clashes with an earlier [[site]] that gives it {earlier.rule.formats}")
        if covers(other, glob):
            raise table.error(f"match = {glob!r} can never match: the earlier {other!r} takes all its sites first")


def _families(top: Table, names: _Names) -> dict[str, Family]:
    families: dict[str, Family] = {}
    for table in top.tables("family"):
        name = table.text("name")
        if name in families:
            raise table.error(f"name = {name!r}: an earlier [[family]] of this file has it")
        family = Family(
            name=name,
            classes=table.texts("classes", ()),
            ops=tuple(names.op(table, "ops", op) for op in table.texts("ops", ())),
            min_sites=table.whole("min_sites", 1),
            keep=tuple(_family_rule(keep, names) for keep in table.tables("keep")),
            why=table.text("why"),
            source=table.text("source", top.file),
            file=top.file,
        )
        table.done()
        if not family.classes and not family.ops:
            raise table.error("can never match: give classes or ops by which the family is recognised")
        families[name] = family
    return families


def _family_rule(table: Table, names: _Names) -> FamilyRule:
    rule = FamilyRule(
        classes=table.texts("classes", ()),
        names=table.texts("names", ()),
        ops=tuple(names.op(table, "ops", op) for op in table.texts("ops", ())),
        position=cast(Position, table.choice("position", get_args(Position)[1:], "")),
        precision=cast(Precision, table.choice("precision", get_args(Precision))),
        why=table.text("why"),
        source=table.text("source", table.file),
    )
    table.done()
    if not (rule.classes or rule.names or rule.ops or rule.position):
        raise table.error("would match every site: give classes, names, ops or position")
    return rule


def _scaler(top: Table) -> tuple[ScalerPrior, ...]:
    priors: list[ScalerPrior] = []
    for table in top.tables("scaler"):
        below = table.number("below_params") if table.has("below_params") else _NO_LIMIT
        numbers = {
            "init_scale": table.number("init_scale"),
            "growth_factor": table.number("growth_factor", 2.0),
            "backoff_factor": table.number("backoff_factor", 0.5),
            "min_scale": table.number("min_scale", 1.0),
            "max_scale": table.number("max_scale", 2.0**24),
        }
        try:
            settings = ScalerSettings(enabled=True, growth_interval=table.whole("growth_interval"), **numbers)
        except UsageError as error:
            raise table.error(str(error)) from error
        if priors and below <= priors[-1].below_params:
            raise table.error(f"below_params = {below:g} can never match: the one before reaches that far already")
        why, source = table.text("why"), table.text("source", top.file)
        table.done()
        priors.append(ScalerPrior(below_params=below, settings=settings, why=why, source=source, file=top.file))
    if priors and priors[-1].below_params != _NO_LIMIT:
        raise top.error("the last [[scaler]] must have no below_params, so that every model size has a prior")
    return tuple(priors)
