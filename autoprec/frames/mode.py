"""The frame: what each op does while one module's forward runs.

One :class:`FrameMode` is active per outermost call of a converted model.  Its ``frame`` belongs to the module whose
forward runs now; forwards swap it (:mod:`autoprec.frames.swap`).  A handler runs with its mode switched off, so what it
calls isn't seen again: the outermost overridable call is the site.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from autoprec.frames.outputs import upcast_floats

#: What to do with one call: ``action(func, args, kwargs)`` returns what the call returns.
Action = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: Ops that take functions, as a compiler names them: their branches, or their steps, return one dtype.
_BRANCHES = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan"})

#: Raw names of the ops that the mode itself treats.
_SPECIAL = _BRANCHES | {"tag_activation_checkpoint", "unflatten"}


class Frame(Protocol):
    """What a module's forward does with each op, looked up by the function's raw name."""

    @property
    def actions(self) -> Mapping[str, Action]:
        """Raw function name → action; an op that isn't there runs as it is."""
        ...

    def enter(self) -> Frame:
        """The frame of one activation; a counting frame returns a fresh copy of itself."""
        ...


class FrameMode(TorchFunctionMode):
    """Sends every op of an outermost call to the current frame."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        action = self.frame.actions.get(name)
        if action is not None:
            return action(func, args, kwargs or {})
        if name in _SPECIAL:
            return self._special(name, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _special(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "unflatten":
            # Dynamo can't call the unbound method under a mode: it takes it for a super() attribute.
            return args[0].unflatten(*args[1:], **kwargs)
        if name == "tag_activation_checkpoint":
            return func(Scoped(args[0], self.frame), *args[1:], **kwargs)
        return func(*[Scoped(a, self.frame, fp32=True) if callable(a) else upcast_floats(a) for a in args], **kwargs)


def _in_any_graph(change: Callable[..., Any], *args: Any) -> Any:
    """Changes the mode stack where a compiler allows no side effects: the change is undone before the body ends."""
    if not torch.compiler.is_compiling():
        return change(*args)
    from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as allowed

    return allowed(change, *args)


def run_in(frame: Frame, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(…)`` in a fresh activation of ``frame``, where no mode is active."""
    # Not `with FrameMode(…)`: a compiler refuses that in a checkpointed body, where a converted module may be called.
    _in_any_graph(push_mode, FrameMode(frame.enter()))
    try:
        return function(*args, **kwargs)
    finally:
        _in_any_graph(pop_own_mode)


class Scoped:
    """A function that runs in the frame it was given in, whenever it is called.

    A compiler traces the functions given to an op with the mode off.

    Args:
        function: the function.
        frame: its frame.
        fp32: what it returns has the dtypes of the fp32 model.
    """

    def __init__(self, function: Callable[..., Any], frame: Frame, fp32: bool = False) -> None:
        self.function = function
        self.frame = frame
        self.fp32 = fp32

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_mode() is not None:
            return self.function(*args, **kwargs)
        out = run_in(self.frame, self.function, *args, **kwargs)
        return upcast_floats(out) if self.fp32 else out


def scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` bound to the current frame, or as it is when there is none."""
    mode = current_mode()
    return function if mode is None or isinstance(function, Scoped) else Scoped(function, mode.frame)


def current_mode() -> FrameMode | None:
    """The active frame mode of this thread, or None; a user's own modes may lie above or below it."""
    for i in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(i)
        if isinstance(mode, FrameMode):
            return mode
    return None


def pop_own_mode() -> FrameMode | None:
    """Takes the frame mode off the stack if it is on top, and returns it; for a forward that is one op."""
    n = torch._C._len_torch_function_stack()
    if n and isinstance(torch._C._get_function_stack_at(n - 1), FrameMode):
        return torch._C._pop_torch_function_stack()  # type: ignore[return-value]
    return None


def push_mode(mode: FrameMode | None) -> None:
    """Puts back what :func:`pop_own_mode` returned."""
    if mode is not None:
        torch._C._push_on_torch_function_stack(mode)


_NOTHING = contextlib.nullcontext()


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Switches a caller's autocast off where it is on."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _NOTHING


@functools.cache
def keep_out_of_dynamo() -> None:
    """Dynamo must inline the handler, never compile it as a frame of its own.

    After a graph break it would take the handler for the next frame, and ``x.device`` then returned another property.
    Done at the first conversion, not at import: ``torch._dynamo`` takes seconds to import.
    """
    from torch._dynamo.eval_frame import skip_code

    for func in (FrameMode.__torch_function__, FrameMode._special, current_mode, pop_own_mode, push_mode, run_in):
        skip_code(func.__code__)
