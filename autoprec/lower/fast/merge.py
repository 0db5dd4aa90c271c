"""Merges casts in a captured graph where the result keeps every bit.

Who reads a second cast of the same tensor to the same dtype reads the first one; a cast up and back down to the dtype
it came from is passed by.  Only the reads of GEMMs change: their outputs are fresh tensors, so that no alias arises
that the caller could write through.  A graph that writes any tensor is left as it is.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autoprec.lower.weights import cast_weight

#: Ops that read their operands and return fresh memory, whatever their arguments.
_GEMMS = frozenset(
    {
        "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
    }
)  # fmt: skip
_LOW = (torch.bfloat16, torch.float16)


def merge_casts(module: fx.GraphModule) -> int:
    """Merges what can be merged exactly.  Returns the number of casts that went."""
    nodes = list(module.graph.nodes)
    if any(_writes(node) for node in nodes):
        return 0
    first: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    before = sum(map(_is_cast, nodes))
    for node in nodes:
        if not _is_cast(node):
            continue
        source, dtype = node.args
        origin = _origin(source, dtype)
        for user in list(node.users):
            if _is_gemm(user):
                user.replace_input_with(node, first.get((source, dtype), node) if origin is None else origin)
        first.setdefault((source, dtype), node)
    for node in reversed(nodes):
        if _is_cast(node) and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return before - sum(map(_is_cast, module.graph.nodes))


def keep_weight_casts(module: fx.GraphModule) -> int:
    """Casts of parameters that only GEMMs read are kept from call to call.  Returns their number."""
    found = [
        node
        for node in module.graph.nodes
        if _is_cast(node) and _is_parameter(node.args[0]) and all(map(_is_gemm, node.users))
    ]
    for node in found:
        node.op, node.target = "call_function", _kept_cast()
    module.recompile()
    return len(found)


def _kept_cast() -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    """``cast_weight`` that remembers its last answer: a look-up in a weak dictionary takes longer than a small cast."""
    of: Callable[[], Any] = lambda: None  # noqa: E731
    version, address = -1, -1
    low = torch.empty(0)

    def kept_cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        nonlocal of, version, address, low
        if of() is not weight or version != weight._version or address != weight.data_ptr():
            of, version, address = weakref.ref(weight), weight._version, weight.data_ptr()
            low = cast_weight(weight, dtype)
        return low

    return kept_cast


def _is_cast(node: Any) -> bool:
    """``x.to(dtype)``, as our actions write it."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_method"
        and node.target == "to"
        and len(node.args) == 2
        and isinstance(node.args[1], torch.dtype)
        and not node.kwargs
        and isinstance(node.args[0], fx.Node)
    )


def _origin(source: fx.Node, dtype: Any) -> fx.Node | None:
    """What ``source`` was cast up from, if that was ``dtype``."""
    if not _is_cast(source) or dtype not in _LOW or source.args[1] != torch.float32:
        return None
    origin: Any = source.args[0]
    return origin if getattr(origin.meta.get("example_value"), "dtype", None) == dtype else None


def _is_gemm(node: fx.Node) -> bool:
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _GEMMS and node.kwargs.get("out") is None


def _is_parameter(node: Any) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), nn.Parameter)


def _writes(node: fx.Node) -> bool:
    """Whether a node may write a tensor or change how later ones run; what isn't known counts as writing."""
    if node.op == "call_method":
        return str(node.target).endswith("_") or node.kwargs.get("out") is not None
    if node.op != "call_function":
        return node.op == "call_module"
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name, home = getattr(target, "__name__", "_"), getattr(target, "__module__", None) or ""
    if home == "_operator":
        return name == "setitem" or (
            name[0] == "i" and name not in ("index", "indexOf", "inv", "invert", "is_", "is_not")
        )
    known = home.startswith(("torch", "math", "builtins")) or home == ""
    return not known or name.endswith("_") or "grad_enabled" in name or _is_in_place(node)


def _is_in_place(node: fx.Node) -> bool:
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin shows no signature; those write by name or by out= alone
        return False
    return bool(given.arguments.get("inplace"))
