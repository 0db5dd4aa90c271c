"""Writes the receipt of a conversion, from a recorded call of the converted model where there is one."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.backends.registry import held_bytes
from autoprec.frames.swap import leaf_op, original_class
from autoprec.graph.record import Recording
from autoprec.graph.site import GEMM_OPS, Site
from autoprec.lower.apply import Conversion, storage_format
from autoprec.lower.gemm import needs_backend
from autoprec.lower.matching import RuleMatcher
from autoprec.lower.receipt import Receipt, Row
from autoprec.lower.single import PRODUCTS
from autoprec.plan import PlanRule

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def make_receipt(model: nn.Module, conversion: Conversion, recording: Recording | None) -> Receipt:
    """The receipt; without a recording, what each GEMM layer is asked for and what its backend answers."""
    matcher = RuleMatcher(conversion.plan)
    if recording is None:
        ops = {fqn: leaf_op(original_class(module)) for fqn, module in model.named_modules()}
        rows = [_asked(matcher, conversion, fqn, op) for fqn, op in ops.items() if op]
    else:
        rows = [_recorded(matcher, conversion, site, recording.dtypes[site.id]) for site in recording.sites.values()]
    return Receipt(
        rows=tuple(rows),
        notes=tuple(_notes(model, conversion)),
        recorded=recording is not None,
        extra_bytes=_extra_bytes(model, conversion),
    )


def _asked(matcher: RuleMatcher, conversion: Conversion, fqn: str, op: str) -> Row:
    """A layer that hasn't run: what a backend, or none, makes of it is known from its weight; its tokens aren't."""
    rule = matcher.rule_for_site(fqn, op, 0)
    asked, reason = _words(rule)
    backend, answer = conversion.backends.get(fqn, ("", ""))
    if backend:
        why = _join(reason, answer, "how many tokens it gets isn't known before a call")
        return Row(site=fqn, op=op, asked=asked, got="", why=why, mechanism=f"backend:{backend}")
    if rule is None or not needs_backend(rule.formats, conversion.plan.mode):
        return Row(site=fqn, op=op, asked=asked, got="", why=reason, mechanism="none" if rule is None else "frame")
    low = storage_format(conversion.plan) or "fp32"
    why = f"will run in {low}: {answer or _why_not(rule, op, ())} (plan: {reason})"
    return Row(site=fqn, op=op, asked=asked, got=low, why=why, mechanism="frame")


def _recorded(matcher: RuleMatcher, conversion: Conversion, site: Site, dtypes: tuple[torch.dtype, ...]) -> Row:
    rule = matcher.rule_for_site(site.scope, site.op, site.index)
    asked, why = _words(rule)
    backend, answer = conversion.backends.get(site.module, ("", "")) if site.leaf else ("", "")
    if site.leaf and site.module in conversion.fusions:
        layers = conversion.fusions[site.module]
        product = f"the product of {' and '.join(map(repr, layers))}"
        why = _join(why, f"te fused: runs in {product}, which reads its weight in the dtype of its input")
        mechanism = f"backend:{conversion.backends[layers[0]][0]}"
        return Row(site=site.id, op=site.op, asked=asked, got=asked, why=why, mechanism=mechanism)
    if backend:
        answer = _join(answer, _fused_with(conversion, site.module) or conversion.unfused.get(site.module, ""))
        return Row(
            site=site.id,
            op=site.op,
            asked=asked,
            got=asked,
            why=_join(why, answer),
            mechanism=f"backend:{backend}",
            flops=site.flops,
        )
    got = _got(site, dtypes)
    if asked == "tf32" and got == "fp32" and site.op in PRODUCTS and (site.op != "einsum" or len(dtypes) == 2):
        got = asked
    if asked not in ("follow", got) and got:
        why = f"ran in {got}: {answer or _why_not(rule, site.op, dtypes)} (plan: {why})"
    mechanism = "none" if rule is None else "frame"
    return Row(site=site.id, op=site.op, asked=asked, got=got, why=why, mechanism=mechanism, flops=site.flops)


def _fused_with(conversion: Conversion, fqn: str) -> str:
    for norm, layers in conversion.fusions.items():
        if fqn in layers:
            others = [f"layer {layer!r}" for layer in layers if layer != fqn]
            return f"te fused: with {' and '.join([f'norm {norm!r}', *others])}"
    return ""


def _words(rule: PlanRule | None) -> tuple[str, str]:
    return ("follow", "no rule takes it") if rule is None else (str(rule.formats), rule.reason)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _got(site: Site, dtypes: tuple[torch.dtype, ...]) -> str:
    """The format a site ran in: that of its operands; mixed operands count as the widest."""
    if not dtypes:
        return ""
    widest = max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    if site.op not in GEMM_OPS:
        return _NAMES.get(dtypes[0], str(dtypes[0]))
    return _NAMES.get(widest, str(widest))


def _why_not(rule: PlanRule | None, op: str, dtypes: tuple[torch.dtype, ...]) -> str:
    if rule is not None and needs_backend(rule.formats, "training"):
        return f"only linear layers have kernels below 16 bit, and this is {op!r}"
    if torch.float64 in dtypes:
        return "an operand is fp64, which is never narrowed"
    if rule is not None and rule.formats.input == "tf32" and op not in PRODUCTS:
        return f"tf32 is the rounding of one product's operands, and {op!r} is more than one"
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
    return stored + kept_bytes(model.parameters()) + held_bytes(model.parameters())
