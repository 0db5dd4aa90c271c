"""Takes one graph of a converted model's forward from Dynamo, casts included.

``torch.compile(fullgraph=True)`` with a backend that runs the graph as it is, op by op.  Broken graphs aren't used:
their pieces would be cached on the user's own functions, and use up the recompiles that the user's ``torch.compile``
has there.
"""

from __future__ import annotations

import itertools
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autoprec.frames.swap import STATE, run_outermost
from autoprec.lower.fast.merge import keep_weight_casts, merge_casts

#: Runs a model's forward as a graph: ``graph(module, inner, args, kwargs)``.
Compiled = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: Dynamo's settings while it traces for us: failures are told, one graph under DDP too, RNN layers stay one op.
_SETTINGS: dict[str, Any] = {"suppress_errors": False, "optimize_ddp": False, "allow_rnn": True}

#: Start of the names of guards on our own functions and constants, which nothing changes.
_OWN = ("G['__import_autoprec_dot_frames", "G['__import_autoprec_dot_lower")

_numbers = itertools.count()
_local = threading.local()


class GraphNeededError(BaseException):
    """No graph fits this call, and Dynamo began to trace one where it hadn't been asked to.

    Not an Exception: Dynamo would take it for the traced program's and wrap it.
    """


class RefusedError(BaseException):
    """A graph that may not stand in for the forward; says why."""


@dataclass
class Graphs:
    """What the graphs of one model share.

    Args:
        merge_training: merge casts where gradients are recorded too, which changes those at rounding level.
        keep_weights: use weight casts kept from call to call, as the mode does in inference.
        entered: a graph began to run since this was last set to False: an exception is then the model's own.
    """

    merge_training: bool = False
    keep_weights: bool = False
    entered: bool = False

    def lower(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """The graph as a callable, casts merged where that is exact."""
        _check(graph)
        if not torch.is_grad_enabled() or self.merge_training:
            merge_casts(graph)
        if self.keep_weights and not torch.is_grad_enabled():
            keep_weight_casts(graph)
        # Dynamo's own graph module compiles lazily, and goes through three wrappers at each call.
        forward = fx.GraphModule(graph, graph.graph).forward

        def run(*args: Any) -> Any:
            self.entered = True
            return forward(*args)

        return run


def compile_forward() -> Compiled:
    """A function of its own code object, so that its graphs share a recompile limit with nobody's."""

    def forward(module: nn.Module, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            _require_capture()
        return run_outermost(module, "forward", inner, args, kwargs)

    # Runs while Dynamo traces, not in the graph.
    torch.compiler.assume_constant_result(_require_capture)
    code = forward.__code__.replace(co_name=f"autoprec_forward_{next(_numbers)}")
    own = types.FunctionType(code, globals(), code.co_name)
    return torch.compile(own, backend=_take_graph, fullgraph=True, options={"guard_filter_fn": needed_guards})


def capture(graphs: Graphs, compiled: Compiled, *call: Any) -> Any:
    """Runs one call for which Dynamo may trace a new graph; leaves its settings and the warning filters as they were.

    Raises:
        RefusedError: the graph may not be used.
        Exception: Dynamo can't capture the forward in one graph, or the forward itself fails.
    """
    import torch._dynamo.config as config

    _local.graphs = graphs
    try:
        with warnings.catch_warnings(), config.patch(**_SETTINGS):
            warnings.simplefilter("ignore")  # about our tracing, not about the user's code
            return compiled(*call)
    finally:
        _local.graphs = None


def _require_capture() -> None:
    if getattr(_local, "graphs", None) is None:
        raise GraphNeededError


def _take_graph(graph: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The Dynamo backend; one for all models, since Dynamo keeps every backend for good."""
    graphs = getattr(_local, "graphs", None)
    if graphs is None:
        raise GraphNeededError
    return graphs.lower(graph)


def needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Which guards Dynamo keeps: not those on our frames, nor those that the model's watch stands for.

    With all of them a call of a small model takes longer than under ``torch.autocast``.
    """
    return [not _is_watched(guard) for guard in guards]


def _is_watched(guard: Any) -> bool:
    """Whether :class:`ModelWatch` tells the same, or a guard is on what the frames are made of."""
    if guard.guard_type == "NOT_PRESENT_IN_GENERIC_DICT":
        return isinstance(guard.value, nn.Module)
    own_wrapper = guard.name.startswith("dict(type(") and guard.name.count(".__closure__") == 1
    return (
        guard.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT"
        or f".{STATE}" in guard.name
        or guard.name.startswith(_OWN)
        or own_wrapper
    )


def _check(graph: fx.GraphModule) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._ops import HigherOrderOperator

    for node in graph.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            # Their bodies run without our mode, and their gradients may differ from the forward's own.
            raise RefusedError(f"its forward calls {node.target.name()}")
    written = InstructionTranslator.current_tx().output.get_replayed_side_effect_source_refs()
    # The mode stack has no source: our own mode is pushed and popped.
    outside = [source for source in written if source != "<unknown source>"]
    if outside:
        raise RefusedError(f"its forward writes Python state: {', '.join(outside[:3])}")
