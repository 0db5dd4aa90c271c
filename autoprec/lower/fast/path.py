"""Runs a converted root through its captured graph where that was measured to be faster, else through the mode.

A model starts in the mode.  Once its forwards have taken a second in all, and if they are short enough for the mode's
cost to matter, a graph is captured and compared bit for bit with the mode on that very call.  The next calls take
turns, and the faster way stays.  Whatever goes wrong or isn't foreseen runs through the mode, which is always complete.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from autoprec.frames.swap import run_outermost
from autoprec.lower.fast.capture import Compiled, GraphNeededError, Graphs, RefusedError, capture, compile_forward
from autoprec.lower.fast.compare import run_both
from autoprec.lower.fast.conditions import ModelWatch, somebody_else_runs, why_unavailable

#: A capture costs some 10 ms an op, and gains a few µs an op and call: a program shorter than this gains nothing.
CAPTURE_AFTER_S = 1.0
#: A longer forward hides the mode's Python; measured, its gain is below 2% there.
LONGEST_FORWARD_S = 0.020
#: Calls in the mode before the length of a forward is judged.
WARM_UP = 5
#: Timed calls of each way.
TURNS = 15
#: A gain below this share is noise, and the mode is the simpler of the two.
LEAST_GAIN = 0.02
#: Graphs of one model: train and eval, with and without gradients, fixed and changing shapes.
MAX_GRAPHS = 6

Inner = Callable[..., Any]


class FastPath:
    """The fast path of one converted root; a copy or an unpickled one starts again.

    Args:
        keep_weights: the plan is for inference: weight casts are kept from call to call.
        merge_training: the plan asks for merged casts in training.
    """

    def __init__(self, keep_weights: bool, merge_training: bool) -> None:
        self._settings = (keep_weights, merge_training)
        self._graphs = Graphs(keep_weights=keep_weights, merge_training=merge_training)
        self._stage = "watching"
        self._note = (
            f"every op runs in the mode; a graph is tried once forwards have taken {CAPTURE_AFTER_S:g} s in all"
        )
        self._thread: int | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._compiled: Compiled | None = None
        self._watch: ModelWatch | None = None
        self._captures = 0
        self._mode_s: list[float] = []
        self._graph_s: list[float] = []
        missing = why_unavailable()
        if missing is not None:
            self._stop(missing)

    def __reduce__(self) -> tuple[Any, ...]:
        return FastPath, self._settings

    @property
    def note(self) -> str:
        """Which mechanism runs, and why."""
        root = None if self._root is None else self._root()
        objection = None if self._watch is None or root is None else self._watch.objection(root)
        return self._note if objection is None else f"every op runs in the mode: {objection}"

    @property
    def stage(self) -> str:
        """``watching``, ``measuring``, ``graph`` (it runs) or ``mode`` (for good)."""
        return self._stage

    def __call__(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``inner(module, …)`` gives in the module's frames."""
        if self._stage == "mode" or somebody_else_runs() or not self._is_ours(module):
            return run_outermost(module, "forward", inner, args, kwargs)
        if self._stage == "graph":
            return self._run_graph(module, inner, args, kwargs)
        if self._stage == "measuring":
            return self._measure(module, inner, args, kwargs)
        return self._watch_length(module, inner, args, kwargs)

    def _is_ours(self, module: nn.Module) -> bool:
        """Whether this is the model and thread of the first call, and the model as it was captured."""
        if self._root is None:
            self._root, self._thread = weakref.ref(module), threading.get_ident()
        # A shallow copy (a DataParallel replica) has the same fast path but is another model.
        if self._root() is not module or self._thread != threading.get_ident():
            return False
        return self._watch is None or self._watch.objection(module) is None

    def _watch_length(self, *call: Any) -> Any:
        if sum(self._mode_s) >= CAPTURE_AFTER_S:
            return self._capture(*call)
        output = self._timed(self._mode_s, _run_mode, *call)
        if len(self._mode_s) == WARM_UP and min(self._mode_s) > LONGEST_FORWARD_S:
            self._stop(f"a forward takes {min(self._mode_s) * 1e3:.0f} ms, beside which the mode's own time is nothing")
        return output

    def _measure(self, *call: Any) -> Any:
        """One turn of the interleaved measurement, which serves the user's call."""
        if len(self._graph_s) <= len(self._mode_s):
            captures = self._captures
            output = self._timed(self._graph_s, self._run_graph, *call)
            if self._captures != captures and self._graph_s:
                self._graph_s.pop()  # it was spent on a capture
        else:
            output = self._timed(self._mode_s, _run_mode, *call)
        if self._stage == "measuring" and min(len(self._graph_s), len(self._mode_s)) > TURNS:
            self._decide()
        return output

    def _decide(self) -> None:
        mode_s, graph_s = _typical_s(self._mode_s), _typical_s(self._graph_s)
        measured = f"{graph_s * 1e6:.0f} µs a forward against {mode_s * 1e6:.0f} in the mode (measured, {TURNS} each)"
        if graph_s > mode_s * (1 - LEAST_GAIN):
            self._stop(f"a captured graph is no faster: {measured}")
        else:
            self._stage, self._note = "graph", f"a captured graph runs: {measured}"

    def _timed(self, times: list[float], run: Callable[..., Any], *call: Any) -> Any:
        start = time.perf_counter()
        output = run(*call)
        times.append(time.perf_counter() - start)
        return output

    def _run_graph(self, *call: Any) -> Any:
        if self._compiled is None:
            return self._capture(*call)
        self._graphs.entered = False
        try:
            return self._compiled(*call)
        except GraphNeededError:
            return self._capture(*call)
        except Exception as error:
            if self._graphs.entered:
                raise  # the model's own
            return self._fall_back(error, *call)

    def _capture(self, module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Captures a graph for this call, serves the call through the mode, and compares."""
        if self._captures == MAX_GRAPHS:
            self._stop(f"its calls need more than {MAX_GRAPHS} graphs")
            return _run_mode(module, inner, args, kwargs)
        self._watch = ModelWatch(module)
        objection = self._watch.objection(module)
        if objection is not None:
            self._stop(objection)
            return _run_mode(module, inner, args, kwargs)
        compiled = self._compiled = self._compiled or compile_forward()
        self._graphs.entered = False
        failed_itself = True

        def run_graph(args: Any, kwargs: Any) -> Any:
            return capture(self._graphs, compiled, module, inner, args, kwargs)

        def run_mode(args: Any, kwargs: Any) -> Any:
            nonlocal failed_itself
            failed_itself = False
            return _run_mode(module, inner, args, kwargs)

        try:
            output, difference = run_both(module, args, kwargs, run_graph, run_mode)
        except (Exception, RefusedError) as error:
            if failed_itself:
                return self._fall_back(error, module, inner, args, kwargs)
            raise  # the model's own: the user sees it, and the next call tries again
        self._accept(difference)
        return output

    def _accept(self, difference: str | None) -> None:
        self._captures += 1
        if not self._graphs.entered:
            self._stop("torch.compile is switched off in this process")
        elif difference is not None:
            self._stop(f"a captured graph gave another result in {difference}")
        elif self._stage == "watching":
            self._stage, self._mode_s, self._graph_s = "measuring", [], []

    def _fall_back(self, error: BaseException, *call: Any) -> Any:
        """Serves a call that no graph could; a call that fails in the mode too says nothing about the graph."""
        output = _run_mode(*call)
        self._stop(f"no graph could be captured: {_first_line(error)}")
        return output

    def _stop(self, why: str) -> None:
        self._stage, self._note = "mode", f"every op runs in the mode: {why}"
        self._compiled = self._watch = None
        self._mode_s, self._graph_s = [], []


def _run_mode(module: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_outermost(module, "forward", inner, args, kwargs)


def _typical_s(times: list[float]) -> float:
    """The lower quartile, since what others on the machine do only adds; the first came right after a capture."""
    return sorted(times[1:])[(len(times) - 1) // 4]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, RefusedError) else f"{type(error).__name__}: {lines[0]}"
