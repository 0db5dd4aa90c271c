"""The layers of a model as sites, from a recording or, where nothing was run, from the modules alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.frames.swap import leaf_op, original_class
from autoprec.graph.site import Site

#: Weights that a kernel below 16 bit takes.
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)

#: Of a mixture whose config doesn't say.
EXPERTS_PER_TOKEN = 2

_UNCALLED = "it isn't called on the example inputs, so that nothing shows how its weight is used"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """One ``nn.Linear`` of a model.

    Args:
        fqn: as ``named_modules()`` gives it.
        in_features, out_features: of its weight; 0 where it has no shape yet.
        num_tokens: rows of its input at the recorded call; None where it wasn't recorded.
        trains_weight: its weight gets a gradient.
        num_experts: entries of the list of experts it is in; 1 outside of one.
        experts_per_token: of those, how many a token goes to.
        obstacle: why no kernel below 16 bit can take it, whatever it would gain; empty if one can.
    """

    fqn: str
    in_features: int
    out_features: int
    num_tokens: int | None
    trains_weight: bool
    num_experts: int = 1
    experts_per_token: int = 1
    obstacle: str

    @property
    def glob_name(self) -> str:
        """What a plan's rule calls it: a root that is itself the layer has no name but its op's."""
        return self.fqn or "::linear"


def module_sites(model: nn.Module) -> list[Site]:
    """The layers that are one matrix product, in order of registration, without shapes of activations."""
    sites = []
    for fqn, module in model.named_modules():
        op = leaf_op(original_class(module)) or _recurrent_op(module)
        if op is not None:
            sites.append(Site(module=fqn, op=op, leaf=True))
    return sites


def _recurrent_op(module: nn.Module) -> str | None:
    if isinstance(module, nn.RNNBase):
        return module.mode.lower()
    return "multi_head_attention_forward" if isinstance(module, nn.MultiheadAttention) else None


def class_names(model: nn.Module) -> dict[str, str]:
    """FQN → class name of every module; a conversion keeps it."""
    return {fqn: type(module).__name__ for fqn, module in model.named_modules()}


def linear_layers(model: nn.Module, recorded: dict[str, Site] | None) -> Iterator[LinearLayer]:
    """Every ``nn.Linear`` and subclass of one, with what stands in the way of a kernel below 16 bit.

    Args:
        model: any module, on the meta device too; weights aren't read.
        recorded: id → site, as a run showed them; None without one.
    """
    modules = dict(model.named_modules())
    owners = _owners(modules)
    asked = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    picked = asked if isinstance(asked, int) and asked > 0 else EXPERTS_PER_TOKEN
    for fqn, module in modules.items():
        if isinstance(module, nn.Linear):
            layer = _linear_layer(fqn, module, modules, owners, recorded)
            experts = _num_experts(fqn, modules)
            yield layer if experts == 1 else replace(layer, num_experts=experts, experts_per_token=min(picked, experts))


def _num_experts(fqn: str, modules: dict[str, nn.Module]) -> int:
    """Entries of the outermost list named ``experts`` around a module; 1 if there is none."""
    parts = fqn.split(".")
    for n, part in enumerate(parts[:-1]):
        if part == "experts" and parts[n + 1].isdecimal():
            return max(1, sum(1 for _ in modules[".".join(parts[: n + 1])].children()))
    return 1


def _linear_layer(
    fqn: str,
    module: nn.Linear,
    modules: dict[str, nn.Module],
    owners: dict[int, list[str]],
    recorded: dict[str, Site] | None,
) -> LinearLayer:
    weight: Any = module._parameters.get("weight")
    out_features, in_features = _shape(module, weight)
    site = None if recorded is None else recorded.get(fqn)
    uncalled = recorded is not None and site is None
    return LinearLayer(
        fqn=fqn,
        in_features=in_features,
        out_features=out_features,
        num_tokens=_tokens(site),
        trains_weight=weight is None or weight.requires_grad,
        obstacle=_obstacle(fqn, module, weight, modules, owners) or (_UNCALLED if uncalled else ""),
    )


def _shape(module: nn.Linear, weight: Any) -> tuple[int, int]:
    if weight is not None and is_lazy(weight):
        return 0, 0
    if weight is not None and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return module.out_features, module.in_features  # a parametrized weight is made in each forward


def _tokens(site: Site | None) -> int | None:
    if site is None or not site.input_shapes:
        return None
    tokens = 1
    for size in site.input_shapes[0][:-1]:
        tokens *= size
    return tokens


def _obstacle(
    fqn: str, module: nn.Linear, weight: Any, modules: dict[str, nn.Module], owners: dict[int, list[str]]
) -> str:
    cls = original_class(module)
    if leaf_op(cls) is None:
        return f"{cls.__name__} overrides Linear.forward, and a kernel would take the place of what it does"
    if any(True for _ in module.children()):
        return f"{cls.__name__} holds other modules, and its own forward is one product only"
    parent = modules.get(fqn.rpartition(".")[0]) if fqn else None
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention uses this weight without calling the layer"
    if weight is not None and is_lazy(weight):
        return "a lazy layer has no shape before its first call"
    if weight is not None and weight.dtype not in _CASTABLE:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}, which is never narrowed"
    others = [
        name for name in owners.get(id(weight), ()) if not isinstance(modules[name.rpartition(".")[0]], nn.Linear)
    ]
    if others:
        return f"its weight is tied to {others[0]}, which isn't a linear layer's"
    return ""


def _owners(modules: dict[str, nn.Module]) -> dict[int, list[str]]:
    """``id`` of a parameter → the names it has."""
    owners: dict[int, list[str]] = {}
    for fqn, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{fqn}.{name}" if fqn else name)
    return owners
