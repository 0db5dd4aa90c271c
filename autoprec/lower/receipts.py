"""Writes the receipt of a conversion, from a recorded call of the converted model where there is one."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.frames.swap import leaf_op, original_class
from autoprec.graph.record import Recording
from autoprec.graph.site import GEMM_OPS, Site
from autoprec.lower.apply import Conversion
from autoprec.lower.gemm import DTYPES
from autoprec.lower.matching import RuleMatcher
from autoprec.lower.receipt import Receipt, Row
from autoprec.plan import PlanRule

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def make_receipt(model: nn.Module, conversion: Conversion, recording: Recording | None) -> Receipt:
    """The receipt; without a recording, what each GEMM layer will be asked for."""
    matcher = RuleMatcher(conversion.plan)
    if recording is None:
        rows = [
            _asked(matcher, fqn, module) for fqn, module in model.named_modules() if leaf_op(original_class(module))
        ]
    else:
        rows = [_recorded(matcher, conversion, site, recording.dtypes[site.id]) for site in recording.sites.values()]
    return Receipt(
        rows=tuple(rows),
        notes=tuple(_notes(model, conversion)),
        recorded=recording is not None,
        extra_bytes=_extra_bytes(model, conversion),
    )


def _asked(matcher: RuleMatcher, fqn: str, module: nn.Module) -> Row:
    op = leaf_op(original_class(module)) or ""
    rule = matcher.rule_for_site(fqn, op, 0)
    asked, why = _words(rule)
    return Row(site=fqn, op=op, asked=asked, got="", why=why, mechanism="frame")


def _recorded(matcher: RuleMatcher, conversion: Conversion, site: Site, dtypes: tuple[torch.dtype, ...]) -> Row:
    rule = matcher.rule_for_site(site.scope, site.op, site.index)
    asked, why = _words(rule)
    backend, answer = conversion.backends.get(site.module, ("", "")) if site.leaf else ("", "")
    if backend:
        reason = f"{why}; {answer}"
        return Row(
            site=site.id,
            op=site.op,
            asked=asked,
            got=asked,
            why=reason,
            mechanism=f"backend:{backend}",
            flops=site.flops,
        )
    got = _got(site, dtypes)
    if asked not in ("follow", got) and got:
        why = f"ran in {got}: {answer or _why_not(rule, site.op, dtypes)} (plan: {why})"
    mechanism = "none" if rule is None else "frame"
    return Row(site=site.id, op=site.op, asked=asked, got=got, why=why, mechanism=mechanism, flops=site.flops)


def _words(rule: PlanRule | None) -> tuple[str, str]:
    return ("follow", "no rule takes it") if rule is None else (str(rule.formats), rule.reason)


def _got(site: Site, dtypes: tuple[torch.dtype, ...]) -> str:
    """The format a site ran in: that of its operands; mixed operands count as the widest."""
    if not dtypes:
        return ""
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    if site.op not in GEMM_OPS:
        return _NAMES.get(dtypes[0], str(dtypes[0]))
    return _NAMES.get(widest, str(widest))


def _why_not(rule: PlanRule | None, op: str, dtypes: tuple[torch.dtype, ...]) -> str:
    if rule is not None and rule.formats.input not in DTYPES:
        return f"only linear layers have kernels below 16 bit, and this is {op!r}"
    if torch.float64 in dtypes:
        return "an operand is fp64, which is never narrowed"
    return "the call writes its argument, or its arguments come in another dtype"


def _notes(model: nn.Module, conversion: Conversion) -> list[str]:
    notes = [f"{fqn or 'the model itself'} can't be converted: {reason}" for fqn, reason in conversion.refused.items()]
    plan = conversion.plan
    if plan.mode == "inference" and plan.level == "O1":
        notes.append("each weight is cast once and the cast is kept beside it: up to half the weights' bytes more")
    if conversion.stored is not None:
        notes.append(f"{conversion.stored.bytes} bytes of fp32 values are kept for revert and masters")
    return notes


def _extra_bytes(model: nn.Module, conversion: Conversion) -> int:
    from autoprec.lower.weights import kept_bytes

    stored = 0 if conversion.stored is None else conversion.stored.bytes
    return stored + kept_bytes(model.parameters())
