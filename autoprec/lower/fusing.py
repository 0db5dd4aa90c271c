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
from autoprec.lower.deferred import KINDS, activation_of
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
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Norms to be run in the product that alone reads them, and why others that a product reads are not.

    Args:
        model: not converted, so that a product reads the very tensor that a norm made.
        plan: the plan.
        layers: as :func:`fusing_layers` gives them.
        run: calls the model on example inputs.

    Returns:
        FQN of a norm → of its linear layer, and of a second one where an activation alone is between the two; FQN of a
        linear layer → why its norm stays apart.
    """
    modules, matcher, flow = dict(model.named_modules()), RuleMatcher(plan), _Flow()
    follow(model, run, flow.see)
    fusions: dict[str, tuple[str, ...]] = {}
    reasons: dict[str, str] = {}
    for norm in flow.norms:
        read_by = flow.readers[norm]
        for layer in sorted(set(read_by) & layers.keys()):
            reason = layers[layer] or _several(read_by) or _obstacle(matcher, norm, modules[norm], modules[layer])
            if reason:
                reasons[layer] = f"norm {norm!r} isn't fused: {reason}"
            else:
                second = flow.second_layer(layer)
                whole = second in layers and _is_mlp(matcher, modules, layer, second)
                fusions[norm] = (layer, second) if whole else (layer,)
    return fusions, reasons


class _Flow:
    """Who reads what norms, linear layers and activations make, in one call of a model."""

    def __init__(self) -> None:
        self.norms: list[str] = []
        #: FQN of a norm or layer, or an activation's own name → what read its result: a linear layer's FQN, or a name.
        self.readers: dict[str, list[str]] = defaultdict(list)
        self._made: TensorMap[str] = TensorMap()
        self._count = 0

    def see(self, step: Step) -> None:
        site = step.site
        leaf = site is not None and site.leaf
        self._count += 1
        activation = activation_of(step.name, step.args[1:], step.kwargs)
        name = site.module if site is not None and leaf and not activation else f"{step.name} {self._count}"
        for tensor in step.inputs:
            producer = self._made.get(tensor)
            if producer is not None:
                self.readers[producer].append(name)
        if site is not None and leaf and step.op in KINDS:
            self.norms += [] if name in self.norms else [name]
        elif not activation and not (leaf and step.op == "linear"):
            return
        for tensor in step.outputs:
            self._made[tensor] = name

    def second_layer(self, first: str) -> str:
        """The layer that alone reads the activation that alone reads ``first``; empty if there is none."""
        through = self.readers[first]
        after = self.readers[through[0]] if len(through) == 1 else []
        return after[0] if len(after) == 1 else ""


def _is_mlp(matcher: RuleMatcher, modules: Mapping[str, nn.Module], first: str, second: str) -> bool:
    """Whether two layers are in the same formats and nothing looks on."""
    rules = [matcher.rule_for_site(fqn, "linear", 0) for fqn in (first, second)]
    alike = rules[0] is not None and rules[1] is not None and rules[0].formats == rules[1].formats
    return alike and not _has_hooks(modules[first]) and not _has_hooks(modules[second])


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _several(read_by: list[str]) -> str:
    return f"{len(read_by)} calls read its result: {', '.join(read_by[:4])}" if len(read_by) > 1 else ""


def _obstacle(matcher: RuleMatcher, fqn: str, norm: nn.Module, layer: nn.Module) -> str:
    cls = original_class(norm)
    if not any(cls.forward is kind.forward for kind in _NORMS):
        return f"{cls.__name__} isn't an nn.LayerNorm or nn.RMSNorm"
    if getattr(norm, "weight", None) is None:
        return "it has no weight"
    if _has_hooks(norm) or _has_hooks(layer):
        return "one of the two has hooks, which may read what is between them"
    op = "rms_norm" if issubclass(cls, nn.RMSNorm) else "layer_norm"
    rule = matcher.rule_for_site(fqn, op, 0)
    if rule is None or rule.formats.input not in DTYPES:
        return "no rule of the plan says what it runs in"
    return ""
