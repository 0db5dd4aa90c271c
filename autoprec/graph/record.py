"""Records the sites of a model: which op each forward calls, on which shapes and dtypes.

The model runs in recording frames, which name sites exactly as the frames of a converted model do.  Nothing is traced
symbolically, so any model that runs can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoprec.frames.mode import Action, Frame
from autoprec.frames.swap import framed, leaf_op, original_class
from autoprec.graph.flops import count_flops, recurrent_flops
from autoprec.graph.inputs import Run
from autoprec.graph.sandbox import untouched
from autoprec.graph.site import GEMM_OPS, Site
from autoprec.rulebook.opnames import canonical_op

#: Calls that compute nothing: attribute reads, shape queries, views of metadata.
SILENT = frozenset({
    "__get__", "__set__", "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "ndimension", "element_size", "data_ptr", "storage_offset", "type", "get_device", "__len__", "__hash__",
    "__format__", "__repr__", "requires_grad_", "retain_grad", "register_hook", "is_signed", "untyped_storage",
    "tolist", "item", "__bool__", "__float__", "__int__", "__index__", "is_same_size", "is_nonzero", "is_inference",
    "storage", "numpy", "backward",
})  # fmt: skip


@dataclass(slots=True)
class Call:
    """One recorded call, as an observer sees it.

    Args:
        site: the site, with shapes of this call.
        func, args, kwargs: as the op was called, after casts.
        out: what it returned.
        dtypes: of its floating tensor arguments, after casts.
    """

    site: Site
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    dtypes: tuple[torch.dtype, ...]


#: Sees every call right after it ran, in fp32 unless the model is converted.
Observer = Callable[[Call], None]


@dataclass
class Recording:
    """Sites in order of first call; ``dtypes`` are those of each site's floating operands at its last call."""

    sites: dict[str, Site] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        """Adds a call; a site called again (a shared module) sums its FLOPs."""
        before = self.sites.get(call.site.id)
        site = call.site if before is None else replace(before, flops=before.flops + call.site.flops)
        self.sites[site.id] = site
        self.dtypes[site.id] = call.dtypes


class _RecordingFrame:
    """Stands in front of a module's own frame (none in an fp32 model) and records what passes."""

    def __init__(self, recorder: _Recorder, fqn: str, module: nn.Module, method: str, inner: Frame | None) -> None:
        self.recorder, self.fqn, self.method, self.inner = recorder, fqn, method, inner
        self.leaf = is_leaf(module)
        self.main_op = module.mode.lower() if isinstance(module, nn.RNNBase) else ""
        self.counts: dict[str, int] = {}

    @property
    def actions(self) -> Any:
        return self

    def enter(self) -> _RecordingFrame:
        frame = object.__new__(_RecordingFrame)
        frame.__dict__ = {**self.__dict__, "counts": {}, "inner": self.inner and self.inner.enter()}
        return frame

    def get(self, name: str) -> Action | None:
        inner = self.inner.actions.get(name) if self.inner is not None else None
        if name in SILENT:
            return inner
        return lambda func, args, kwargs: self.recorder.record(self, name, inner, func, args, kwargs)


class _Recorder:
    def __init__(self, recording: Recording, observer: Observer | None) -> None:
        self.recording, self.observer = recording, observer
        self.active = False

    def record(self, frame: _RecordingFrame, name: str, inner: Action | None, func: Any, args: Any, kwargs: Any) -> Any:
        seen: list[tuple[Any, Any]] = []

        def spy(*a: Any, **k: Any) -> Any:
            seen[:] = [(a, k)]
            return func(*a, **k)

        op = canonical_op(name)
        counted = bool(floating((args, kwargs)))
        flops = 0
        if self.active and op in GEMM_OPS:
            out, flops = count_flops(lambda: spy(*args, **kwargs) if inner is None else inner(spy, args, kwargs))
        else:
            out = spy(*args, **kwargs) if inner is None else inner(spy, args, kwargs)
        index = frame.counts.get(op, 0)
        if counted:
            frame.counts[op] = index + 1
        if self.active and (counted or floating(out)):
            a, k = seen[-1] if seen else (args, kwargs)
            self._add(frame, op, index, flops, func, a, k, out)
        return out

    def _add(
        self, frame: _RecordingFrame, op: str, index: int, flops: int, func: Any, args: Any, kwargs: Any, out: Any
    ) -> None:
        inputs = floating((args, kwargs))
        site = Site(
            module=frame.fqn,
            op=op,
            index=index,
            method=frame.method,
            leaf=_is_leaf_op(frame, op, index),
            input_shapes=tuple(tuple(t.shape) for t in inputs),
            output_shapes=tuple(tuple(t.shape) for t in floating(out)),
            flops=flops,
            num_params=sum(t.numel() for t in inputs if isinstance(t, nn.Parameter)),
        )
        if flops == 0 and op in GEMM_OPS:
            site = replace(site, flops=recurrent_flops(op, inputs))
        call = Call(site, func, args, kwargs, out, tuple(t.dtype for t in inputs))
        self.recording.add(call)
        if self.observer is not None:
            self.observer(call)


def _is_leaf_op(frame: _RecordingFrame, op: str, index: int) -> bool:
    """A leaf layer's site is its recurrent kernel, else the first op on a floating tensor."""
    if not frame.leaf or index:
        return False
    return op == frame.main_op if frame.main_op else set(frame.counts) <= {op}


def is_leaf(module: nn.Module) -> bool:
    """A layer of ``torch.nn`` without children: its forward is one op."""
    cls = original_class(module)
    if leaf_op(cls) is not None:
        return not any(True for _ in module.children())
    return cls.__module__.startswith("torch.nn.modules") and not any(True for _ in module.children())


def floating(tree: Any) -> list[torch.Tensor]:
    """The floating tensors in a structure."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]


class _Silent:
    """The frame hooks are recorded in: none."""

    actions: ClassVar[dict[str, Action]] = {}

    def enter(self) -> _Silent:
        return self


def record(model: nn.Module, run: Run, observer: Observer | None = None, grad: bool = False) -> Recording:
    """Runs the model twice on its example inputs and records the second run; leaves the model as it was.

    The first run fills caches that later calls don't fill again.  A converted model is recorded with its casts.

    Args:
        model: any module; stays as it is.
        run: see :func:`autoprec.graph.inputs.as_run`.
        observer: sees each call of the second run.
        grad: record with gradients enabled, for observers that need them.
    """
    recording = Recording()
    recorder = _Recorder(recording, observer)
    states = {module: vars(module).get("_autoprec") for module in model.modules()}

    def make(fqn: str, module: nn.Module, method: str) -> _RecordingFrame:
        state = states[module]
        inner = None if state is None else state.frames.get(method)
        return _RecordingFrame(recorder, fqn, module, method, inner)

    state = vars(model).get("_autoprec")
    neutral: Any = _Silent() if state is None else state.neutral
    restore = True if state is None else state.restore_outputs
    with untouched(model), torch.set_grad_enabled(grad), framed(model, make, neutral, restore) as refused:
        run(model)
        recorder.active = True
        run(model)
    recording.refused.update(refused)
    return recording
