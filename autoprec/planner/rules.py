"""A plan by rules alone: pins first, then what analysis found, then families, then the op rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from autoprec.errors import UsageError
from autoprec.fingerprint import fingerprint
from autoprec.graph.site import GEMM_OPS
from autoprec.plan import Formats, Level, Mode, Plan, PlanRule, ScalerSettings
from autoprec.planner.families import kept_by_families
from autoprec.planner.narrow import narrow_formats, narrow_rules
from autoprec.recipes import DEFAULTS, family_of
from autoprec.rulebook import OpRule, Rulebook, check_rules_match
from autoprec.target import Target

if TYPE_CHECKING:
    from autoprec.analyze import Analysis

#: Formats that a plan may be capped at by ``formats=``, widest first.
CAPS = ("fp32", "tf32", "bf16", "fp16")

_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
#: Layers alone: a product written by hand may be one of positions or scores, which 10 bits of mantissa don't hold.
_TF32 = PlanRule(
    match=tuple(f"*::{op}" for op in _LAYERS),
    formats=Formats.all("tf32"),
    reason="fp32's range and accumulation, with operands of 10 bits of mantissa, at the speed of tensor cores",
    source="op",
)


def plan_by_rules(
    model: nn.Module,
    target: Target,
    rulebook: Rulebook,
    *,
    analysis: Analysis | None = None,
    level: Level = "O1",
    mode: Mode = "training",
    formats: str | None = None,
    merge_casts: bool = False,
) -> Plan:
    """The plan of the shipped rules for one model and target.

    Args:
        model: gives the fingerprint and the number of parameters.
        target: gives the formats.
        rulebook: op rules, families, the user's pins.
        analysis: what was found on example inputs; None for op rules alone.
        level: ``O0`` makes everything fp32.
        mode: training or inference.
        formats: cap: no format below this one (``bf16`` on an H100 means no fp8; ``fp32`` is O0; ``tf32`` is fp32 but
            for the products of layers).
        merge_casts: see :class:`~autoprec.plan.Plan`.
    """
    low = low_format(target, level, formats)
    recorded = analysis.sites if analysis is not None and analysis.is_measured else None
    if recorded is not None:
        check_rules_match(rulebook, [_Named((*site.aliases, site.module)) for site in recorded])
    rules: list[PlanRule] = list(rulebook.plan_rules)
    recipe: dict[str, Any] = {}
    if low != "fp32":
        found = [] if analysis is None else analysis_rules(analysis, low)
        kept = kept_by_families(model, rulebook, recorded)
        rules += [rule for rule in found if rule.formats.input == "fp32"]
        rules += kept.fp32
        rules += [rule for rule in found if rule.formats.input != "fp32"]
        narrow = narrow_formats(target, formats)
        if narrow is not None:
            layers = narrow_rules(model, target, narrow, low=low, mode=mode, kept=kept, recorded=recorded)
            rules += layers
            family = family_of(narrow.input)
            if family is not None and any(rule.formats == narrow for rule in layers):
                recipe = {family: DEFAULTS[family].to_dict()}
        rules += op_rules(rulebook, low)
    elif formats == "tf32" and level != "O0" and "tf32" in target.formats:
        rules += [*kept_by_families(model, rulebook, recorded).fp32, _TF32]
    return Plan(
        rules=tuple(rules),
        target=target.name,
        mode=mode,
        level=level,
        recipe=recipe,
        scaler=scaler_settings(model, rulebook, low, mode),
        merge_casts=merge_casts,
        fingerprint=fingerprint(model),
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """What a user's glob may name of a site: a glob without ``::`` may also name the module around it."""

    aliases: tuple[str, ...]


def low_format(target: Target, level: Level, formats: str | None) -> str:
    """The 16-bit format of GEMMs, or ``fp32``."""
    if formats is not None and formats not in CAPS and formats not in target.formats:
        allowed = ", ".join(dict.fromkeys((*CAPS, *target.formats)))
        raise UsageError(f"formats={formats!r} isn't a format of {target.name}; allowed: {allowed}")
    if level == "O0" or formats in ("fp32", "tf32"):
        return "fp32"
    return formats if formats in ("bf16", "fp16") else target.low_format


def scaler_settings(model: nn.Module, rulebook: Rulebook, low: str, mode: Mode) -> ScalerSettings:
    """Loss scaling where gradients are fp16, with the prior of the model's size."""
    if low != "fp16" or mode != "training":
        return ScalerSettings()
    from dataclasses import replace

    num_params = sum(p.numel() for p in model.parameters())
    return replace(rulebook.scaler_for(num_params).settings, enabled=True)


def op_rules(rulebook: Rulebook, low: str) -> list[PlanRule]:
    """One plan rule per reason: the ops that stay fp32, then those that go low."""
    rules = []
    for kind, format_name in (("fp32", "fp32"), ("low", low)):
        chosen = [rule for rule in rulebook.ops.values() if rule.kind == kind]
        for why, group in itertools.groupby(sorted(chosen, key=_reason_then_op), key=lambda r: r.why):
            match = tuple(f"*::{rule.op}" for rule in group)
            rules.append(PlanRule(match=match, formats=Formats.all(format_name), reason=why, source="op"))
    return rules


def _reason_then_op(rule: OpRule) -> tuple[str, str]:
    return rule.why, rule.op


def analysis_rules(analysis: Analysis, low: str) -> list[PlanRule]:
    """What analysis found against the op rules, sites with one reason and source in one rule."""
    found = [row for row in analysis.rows if row.tag_for(low) == "fp32" and row.source_for(low) != "op"]
    found += [row for row in analysis.rows if _lowered_against_rule(row, low)]
    return [
        PlanRule(match=tuple(ids), formats=Formats.all(format_name), reason=reason, source=source)
        for (format_name, source, reason), ids in _grouped((_verdict(row, low), row.site.id) for row in found).items()
    ]


def _lowered_against_rule(row: Any, low: str) -> bool:
    return row.tag_for(low) == "low" and row.site.op not in GEMM_OPS


def _verdict(row: Any, low: str) -> tuple[str, str, str]:
    return ("fp32" if row.tag_for(low) == "fp32" else low, row.source_for(low), row.reason_for(low))


def _grouped(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    groups: dict[Any, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def keep_rules(pins: Sequence[str]) -> tuple[PlanRule, ...]:
    """Rules of ``SITE=FORMAT`` pins, as ``--keep 'head=fp32'`` gives them.

    Raises:
        UsageError: a pin isn't of that form.
    """
    rules = []
    for pin in pins:
        glob, equals, format_name = pin.rpartition("=")
        if not equals or not glob:
            raise UsageError(f"--keep {pin!r} isn't SITE=FORMAT; write for example 'head=fp32' or '*.attn.*=bf16'")
        rules.append(
            PlanRule(match=(glob,), formats=Formats.all(format_name), reason="pinned by the user", source="user")
        )
    return tuple(rules)
