"""Which linear layers go below 16 bit: those that a kernel can take, that nothing keeps high, and that gain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from autoprec.errors import TargetError
from autoprec.estimate import LinearShape, linear_gain
from autoprec.graph.site import Site
from autoprec.plan import Formats, Mode, PlanRule
from autoprec.planner.families import Kept
from autoprec.planner.fold import fold, grouped, literal
from autoprec.planner.layers import LinearLayer, linear_layers
from autoprec.target import Target

#: Rows of a layer's input where nothing was recorded: two sequences of 4096, a usual share of one device in training.
ASSUMED_TOKENS = 8192

#: A smaller estimated gain may be none: the estimate leaves out what an eager framework adds.  At 1.15 it agrees with
#: the table that https://github.com/pytorch/ao measured on an H100 (2025): K <= 4096 and N <= 1024 don't pay.
MIN_GAIN = 1.15

_LINEAR_OPS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "einsum"})

_ADAPTERS = ("lora_a", "lora_b", "lora_down", "lora_up")


#: Formats of a linear layer below 16 bit, by the one that a target lists.  nvfp4 is none of them: what it costs in loss
#: is for a measurement to say.
_NARROW = {
    "mxfp8": Formats.all("mxfp8"),
    "fp8_e4m3": Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2"),
    "fp8_e4m3fnuz": Formats.all("fp8_e4m3fnuz"),
}


def narrow_formats(target: Target, cap: str | None) -> Formats | None:
    """The 8-bit formats of a linear layer on the target; None if it has none, or the cap forbids them.

    The first that the target lists: mxfp8 before fp8 where the hardware scales blocks itself, since a scale for each 32
    numbers costs no pass over the tensor and loses less.  A cap that names fp8 gives fp8.
    """
    if cap in ("fp32", "tf32", "bf16", "fp16"):
        return None
    for name in target.formats:
        if name in _NARROW and not (name == "mxfp8" and cap in ("fp8_e4m3", "fp8_e5m2")):
            formats = _NARROW[name]
            return formats if set(_roles(formats)) <= set(target.formats) else None
    return None


def _roles(formats: Formats) -> tuple[str, str, str]:
    return formats.input, formats.weight, formats.grad_output


def narrow_rules(
    model: nn.Module,
    target: Target,
    formats: Formats,
    *,
    low: str,
    mode: Mode,
    kept: Kept,
    recorded: Sequence[Site] | None,
) -> list[PlanRule]:
    """One rule per reason: layers that stay at 16 bit, then those that go below.

    Args:
        model: any module, on the meta device too.
        target: the device.
        formats: below 16 bit, by role.
        low: the 16-bit format.
        mode: training or inference.
        kept: what families keep high.
        recorded: sites as a run showed them; None without one.
    """
    sites = None if recorded is None else {site.id: site for site in recorded if site.leaf}
    found: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    for layer in linear_layers(model, sites):
        if layer.fqn not in kept.fp32_sites:
            source, pays, reason = _judge(layer, target, formats, low, mode, kept.high)
            found.setdefault((source, pays), []).append((reason, layer.glob_name))
    found.setdefault(("op", False), []).extend(_other_products(recorded or ()))
    order = (("op", False), ("family", False), ("cost", False), ("cost", True))
    return [
        rule
        for source, pays in order
        for rule in _rules(found.get((source, pays), ()), formats if pays else Formats.all(low), source)
    ]


def _judge(
    layer: LinearLayer, target: Target, formats: Formats, low: str, mode: Mode, high: Mapping[str, str]
) -> tuple[str, bool, str]:
    """Who decides, whether the layer goes below 16 bit, and why: first what can't, then what doesn't gain."""
    if reason := layer.obstacle:
        return "op", False, reason
    if reason := refuse_adapter(layer):
        return "family", False, reason
    if reason := refuse_alignment(layer, target, formats):
        return "op", False, reason
    pays, reason = judge_gain(layer, target, formats, low, mode)
    if pays and layer.fqn in high:
        return "family", False, high[layer.fqn]
    return "cost", pays, reason


def _other_products(recorded: Sequence[Site]) -> Iterator[tuple[str, str]]:
    """Products with a parameter that aren't a linear layer's own: they too say why they stay at 16 bit."""
    for site in recorded:
        if site.op in _LINEAR_OPS and site.num_params and not site.leaf:
            reason = f"only an nn.Linear's own product has kernels below 16 bit, and this is {site.op!r} called by hand"
            yield reason, f"{literal(site.scope)}::{site.op}#{site.index}"


def refuse_adapter(layer: LinearLayer) -> str:
    """Why a low-rank adapter stays at 16 bit; empty for any other layer."""
    if any(part.lower().startswith(_ADAPTERS) for part in layer.fqn.split(".")):
        rank = min(layer.in_features, layer.out_features)
        return f"an adapter of rank {rank}: it holds what is trained, and hardly any FLOPs"
    return ""


def refuse_alignment(layer: LinearLayer, target: Target, formats: Formats) -> str:
    """Which dimension the target's kernels can't take; empty if they take both."""
    multiple = target.align(formats.input)
    for name, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if size % multiple:
            return f"{name}={size} isn't a multiple of {multiple}, as {formats.input} needs on {target.name}"
    return ""


def judge_gain(layer: LinearLayer, target: Target, formats: Formats, low: str, mode: Mode) -> tuple[bool, str]:
    """Whether the layer gains, and the estimate in words."""
    tokens = _tokens(layer)
    shape = LinearShape(
        num_tokens=tokens,
        in_features=layer.in_features,
        out_features=layer.out_features,
        trains_weight=layer.trains_weight,
    )
    if tokens == 0:
        return False, "its input was empty on the example inputs"
    try:
        gain = linear_gain(shape, target, formats, low, mode).value
    except TargetError as error:
        return False, f"nothing shows that it gains: {error}"
    work = f"{layer.in_features} to {layer.out_features} features, {_words(layer, target, formats)}"
    speed = f"estimated {gain:.2f}x the speed of {low} on {target.name}, casts included"
    if gain >= MIN_GAIN:
        return True, f"{speed}: {work}"
    return False, f"too small to gain, {speed} (needs {MIN_GAIN}x): {work}"


def _tokens(layer: LinearLayer) -> int:
    if layer.num_tokens is not None:
        return layer.num_tokens
    return max(1, ASSUMED_TOKENS * layer.experts_per_token // layer.num_experts)


def _words(layer: LinearLayer, target: Target, formats: Formats) -> str:
    if layer.num_tokens is None:
        routed = f", each to {layer.experts_per_token} of {layer.num_experts} experts" if layer.num_experts > 1 else ""
        return f"assuming {ASSUMED_TOKENS} tokens{routed}"
    multiple = target.align(formats.input)
    padding = f", padded to a multiple of {multiple}" if layer.num_tokens % multiple else ""
    return f"{layer.num_tokens} tokens{padding}"


def _rules(pairs: Iterable[tuple[str, str]], formats: Formats, source: str) -> list[PlanRule]:
    return [
        PlanRule(match=_globs(names), formats=formats, reason=reason, source=source)
        for reason, names in grouped(pairs).items()
    ]


def _globs(names: list[str]) -> tuple[str, ...]:
    """Layers by folded names; calls, which are globs already, as they are."""
    layers = [name for name in names if "::" not in name]
    return (*fold(layers), *(name for name in names if "::" in name))
