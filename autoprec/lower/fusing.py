"""Which norms one linear layer alone reads, so that a backend may run both in one: found by following a real call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from autoprec.backends.base import Backend
from autoprec.backends.registry import get_backend
from autoprec.frames.swap import original_class
from autoprec.graph.dataflow import Step, TensorMap, follow
from autoprec.graph.inputs import Run
from autoprec.lower.apply import Conversion
from autoprec.lower.deferred import KINDS
from autoprec.lower.gemm import DTYPES, linear_spec, settings_of
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Plan

_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm)
#: Attributes of a module that hold hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fusing_layers(conversion: Conversion) -> dict[str, str]:
    """FQN of each linear layer whose backend has fused kernels → why not for it; empty if it can."""
    matcher, settings = RuleMatcher(conversion.plan), settings_of(conversion.plan)
    layers = {}
    for fqn, (name, _) in conversion.backends.items():
        rule = matcher.rule_for_site(fqn, "linear", 0)
        if name and rule is not None and type(get_backend(name)).fuses is not Backend.fuses:
            ok, reason = get_backend(name).fuses(linear_spec(rule.formats, settings))
            layers[fqn] = "" if ok else reason
    return layers


def find_fusions(
    model: nn.Module, plan: Plan, layers: Mapping[str, str], run: Run
) -> tuple[dict[str, str], dict[str, str]]:
    """Norms to be run in the product that alone reads them, and why others that a product reads are not.

    Args:
        model: not converted, so that a product reads the very tensor that a norm made.
        plan: the plan.
        layers: as :func:`fusing_layers` gives them.
        run: calls the model on example inputs.

    Returns:
        FQN of a norm → of its linear layer; FQN of a linear layer → why its norm stays apart.
    """
    modules, matcher = dict(model.named_modules()), RuleMatcher(plan)
    fusions: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for norm, read_by in _readers(model, run).items():
        for layer in sorted(set(read_by) & layers.keys()):
            reason = layers[layer] or _several(read_by) or _obstacle(matcher, norm, modules[norm], modules[layer])
            if reason:
                reasons[layer] = f"norm {norm!r} isn't fused: {reason}"
            else:
                fusions[norm] = layer
    return fusions, reasons


def _readers(model: nn.Module, run: Run) -> dict[str, list[str]]:
    """FQN of each norm → what read its result, in order: a linear layer's FQN, or another call's name."""
    made: TensorMap[str] = TensorMap()
    readers: dict[str, list[str]] = defaultdict(list)

    def see(step: Step) -> None:
        site = step.site
        for tensor in step.inputs:
            norm = made.get(tensor)
            if norm is not None:
                readers[norm].append(site.module if site is not None and site.leaf else step.name)
        if site is not None and site.leaf and step.op in KINDS:
            for tensor in step.outputs:
                made[tensor] = site.module

    follow(model, run, see)
    return readers


def _several(read_by: list[str]) -> str:
    return f"{len(read_by)} calls read its result: {', '.join(read_by[:4])}" if len(read_by) > 1 else ""


def _obstacle(matcher: RuleMatcher, fqn: str, norm: nn.Module, layer: nn.Module) -> str:
    cls = original_class(norm)
    if not any(cls.forward is kind.forward for kind in _NORMS):
        return f"{cls.__name__} isn't an nn.LayerNorm or nn.RMSNorm"
    if getattr(norm, "weight", None) is None:
        return "it has no weight"
    if any(getattr(module, name, None) for module in (norm, layer) for name in _HOOKS):
        return "one of the two has hooks, which may read what is between them"
    op = "rms_norm" if issubclass(cls, nn.RMSNorm) else "layer_norm"
    rule = matcher.rule_for_site(fqn, op, 0)
    if rule is None or rule.formats.input not in DTYPES:
        return "no rule of the plan says what it runs in"
    return ""
