"""Gives every module a same-named subclass whose forward runs in its own frame.

The instance, its Parameters, hooks, ``state_dict`` keys and ``isinstance`` stay; only ``__class__`` changes, and
:func:`remove` changes it back.  The plan is in force however a forward is reached: ``model(x)``, a submodule, a method,
a compiled wrapper, an export.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from autoprec.frames.inputs import recurrent_forward, script_call
from autoprec.frames.methods import computing_methods
from autoprec.frames.mode import (
    Frame,
    current_mode,
    keep_out_of_dynamo,
    no_autocast,
    pop_own_mode,
    push_mode,
    run_in,
)
from autoprec.frames.outputs import upcast_floats

#: Name of the attribute that holds a module's frames.
STATE = "_autoprec"

#: Name of a converted root's attribute that may run its forward another, equal way:
#: ``fast(module, inner, args, kwargs)``.
FAST = "_autoprec_fast"

#: Makes the frame of one method of one module: ``make(fqn, module, method) -> Frame``.
MakeFrame = Callable[[str, nn.Module, str], Frame]


class FrameState:
    """The frames of one module, by method, and what an outermost call does around them.

    Args:
        frames: method name → frame; shared by modules that do the same, so that a compiler guards on one object.
        neutral: what hooks run in.
        restore_outputs: cast 16-bit outputs of an outermost call to fp32, as the fp32 model gives them.
    """

    def __init__(self, frames: Mapping[str, Frame], neutral: Frame, restore_outputs: bool = True) -> None:
        self.frames = frames
        self.neutral = neutral
        self.restore_outputs = restore_outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> FrameState:
        return self


def run_framed(module: Any, name: str, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs ``inner(module, …)`` in the module's frame; enters the mode when this is the outermost call."""
    state = module._autoprec
    if state is None:
        return inner(module, *args, **kwargs)
    mode = current_mode()
    if mode is None:
        fast = None if torch.compiler.is_compiling() or name != "forward" else vars(module).get(FAST)
        return run_outermost(module, name, inner, args, kwargs) if fast is None else fast(module, inner, args, kwargs)
    previous = mode.frame
    mode.frame = state.frames[name].enter()
    try:
        return inner(module, *args, **kwargs)
    finally:
        mode.frame = previous


def run_outermost(module: Any, name: str, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs ``inner(module, …)`` in the mode, as an outermost call.

    An autocast of the caller's is switched off meanwhile: it would cast again what the plan keeps in fp32.
    """
    state = module._autoprec
    with no_autocast("cpu"), no_autocast("cuda"):
        out = run_in(state.frames[name], inner, module, *args, **kwargs)
    return upcast_floats(out) if state.restore_outputs else out


def _framed_method(inner: FunctionType, name: str) -> FunctionType:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_framed(self, name, inner, args, kwargs)

    method.__name__, method.__qualname__, method.__doc__ = inner.__name__, inner.__qualname__, inner.__doc__
    # Not __wrapped__: torch.jit.script would follow it and silently script the fp32 original.
    method.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    return method


def _framed_generator(inner: FunctionType, name: str) -> FunctionType:
    """A generator's body runs between the caller's statements: the mode is active only while it computes."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        steps = inner(self, *args, **kwargs)
        resume, value = steps.send, None
        try:
            while True:
                try:
                    item = run_framed(self, name, _resume, (resume, value), {})
                except StopIteration as stop:
                    return stop.value
                try:
                    resume, value = steps.send, (yield item)
                except Exception as error:
                    resume, value = steps.throw, error
        finally:
            steps.close()

    method.__name__, method.__qualname__, method.__doc__ = inner.__name__, inner.__qualname__, inner.__doc__
    method.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    return method


def _resume(module: nn.Module, resume: Callable[[Any], Any], value: Any) -> Any:
    return resume(value)


def _leaf_forward(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer that is one op: acts on it directly, with the mode off the stack meanwhile."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias  # a parametrized weight is computed here, in the caller's frame
        state = self._autoprec
        args = (input, weight, bias)
        if state is None:
            return call(self, None, args)
        mode = pop_own_mode()
        if mode is None and current_mode() is not None:
            # A user's mode lies above ours and calls it: what comes there must find this layer's frame.
            return run_framed(self, "forward", lambda module, *args: call(module, None, args), args, {})
        if mode is None:
            with no_autocast("cpu"), no_autocast("cuda"):
                out = call(self, state.frames["forward"].enter().actions.get(op), args)
            return upcast_floats(out) if state.restore_outputs else out
        try:
            return call(self, state.frames["forward"].enter().actions.get(op), args)
        finally:
            push_mode(mode)

    return forward


def _linear(self: nn.Linear, action: Any, args: tuple[Any, ...]) -> torch.Tensor:
    return F.linear(*args) if action is None else action(F.linear, args, {})


def _convolution(self: Any, action: Any, args: tuple[Any, ...]) -> torch.Tensor:
    forward = self._conv_forward
    return forward(*args) if action is None else action(forward, args, {})


#: Layers whose forward is one GEMM: class → (op, forward).
LEAVES: dict[type[nn.Module], tuple[str, Callable[..., Any]]] = {
    nn.Linear: ("linear", _leaf_forward("linear", _linear)),
    nn.Conv1d: ("conv1d", _leaf_forward("conv1d", _convolution)),
    nn.Conv2d: ("conv2d", _leaf_forward("conv2d", _convolution)),
    nn.Conv3d: ("conv3d", _leaf_forward("conv3d", _convolution)),
}


def leaf_op(cls: type) -> str | None:
    """The op of a layer whose forward is that one GEMM and isn't overridden, else None."""
    for layer, (op, _) in LEAVES.items():
        if getattr(cls, "forward", None) is layer.forward:
            # A convolution may also be changed in `_conv_forward`, where weights are standardised.
            inner = getattr(layer, "_conv_forward", None)
            return op if getattr(cls, "_conv_forward", None) is inner else None
    return None


def _call_impl_in_neutral_frame(inner: Callable[..., Any]) -> Callable[..., Any]:
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self._forward_hooks or self._forward_pre_hooks):
            return inner(self, *args, **kwargs)
        mode = current_mode()
        if mode is None:
            return inner(self, *args, **kwargs)
        previous = mode.frame
        mode.frame = self._autoprec.neutral
        try:
            return inner(self, *args, **kwargs)
        finally:
            mode.frame = previous

    return _call_impl


def _rebuild(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Makes a module as its own class says, then puts it into frames; its state, frames included, comes after."""
    module = make(*args)
    module.__class__ = framed_class(type(module))
    return module


def _pickled(inner: Callable[..., Any], cls: type[nn.Module]) -> Callable[[Any, Any], Any]:
    """``__reduce_ex__`` that names the user's class, since ours can't be imported."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        reduced = inner(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        return (_rebuild, (make, tuple(cls if arg is type(self) else arg for arg in args)), *rest)

    return __reduce_ex__


def _copied(inner: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``__copy__`` or ``__deepcopy__`` of a class that makes copies of the class it knows (a GraphModule)."""

    def copied(self: nn.Module, *args: Any) -> nn.Module:
        module, state = inner(self, *args), self._autoprec
        if state is not None:
            set_frames(module, state)  # type: ignore[arg-type]
        return module

    return copied


def _recompiled(cls: type[torch.fx.GraphModule]) -> Callable[..., Any]:
    """``recompile`` of a GraphModule, which writes the new forward on the class it finds: that has to be its own."""

    def recompile(self: torch.fx.GraphModule) -> Any:
        framed, self.__class__ = type(self), cls
        try:
            return self.recompile()
        finally:
            self.__class__ = framed

    return recompile


def _latest_forward(cls: type[torch.fx.GraphModule]) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    return forward


@functools.cache
def framed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` whose methods run in frames; one per class, same name, module and signature."""
    leaf = leaf_op(cls)
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_autoprec_original": cls,
        STATE: None,  # out of frames, where the class can't be taken off
    }
    if issubclass(cls, torch.jit.ScriptModule):
        namespace["_call_impl"] = script_call(cls._call_impl)
        return _subclass(cls, namespace)
    namespace["__reduce_ex__"] = _pickled(cls.__reduce_ex__, cls)
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(cls, name):
            namespace[name] = _copied(getattr(cls, name))
    finished = getattr(cls, "cls_to_become", None)
    if isinstance(finished, type):
        # A lazy layer takes the class of its finished form at its first call.
        namespace["cls_to_become"] = framed_class(finished)
    namespace["_call_impl"] = _call_impl_in_neutral_frame(cls._call_impl)
    if leaf is not None:
        namespace["forward"] = next(f for op, f in LEAVES.values() if op == leaf)
        return _subclass(cls, namespace)
    methods = {"forward": cls.forward, **computing_methods(cls)}
    if issubclass(cls, torch.fx.GraphModule):
        methods["forward"] = _latest_forward(cls)
        namespace["recompile"] = _recompiled(cls)
    for name, inner in methods.items():
        wrap = _framed_generator if inspect.isgeneratorfunction(inner) else _framed_method
        namespace[name] = wrap(inner, name)
    if issubclass(cls, nn.RNNBase):
        namespace["forward"] = recurrent_forward(namespace["forward"])
    return _subclass(cls, namespace)


def _subclass(cls: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    made: Any = type(cls.__name__, (cls,), namespace)
    return made


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class the user gave the instance; a class made later on top of ours (a parametrization) is looked through."""
    for base in type(module).__mro__:
        if "_autoprec_original" in vars(base):
            return vars(base)["_autoprec_original"]
    return type(module)


def is_framed(module: nn.Module) -> bool:
    """Whether the instance runs in frames."""
    return STATE in vars(module)


def framed_methods(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of the methods of ``cls`` that get a frame; none in compiled code."""
    if issubclass(cls, torch.jit.ScriptModule):
        return ()
    return ("forward",) if leaf_op(cls) else ("forward", *computing_methods(cls))


def set_frames(module: nn.Module, state: FrameState) -> str | None:
    """Puts a module into frames, or replaces its frames.  Returns why it can't, or None."""
    keep_out_of_dynamo()
    cls = type(module)
    if not _in_frames(cls):
        try:
            module.__class__ = _framed_under_parametrization(cls) if is_parametrized(module) else framed_class(cls)
        except TypeError as error:
            return f"{cls.__name__} can't take a subclass: {error}"
    vars(module)[STATE] = state
    return None


def remove(module: nn.Module) -> None:
    """Takes one module out of frames; a class made on top of ours is kept, on the original one."""
    vars(module).pop(STATE, None)
    cls = type(module)
    if _in_frames(cls):
        module.__class__ = _without_frames(cls)


def _in_frames(cls: type) -> bool:
    return any("_autoprec_original" in vars(base) for base in cls.__mro__)


def _framed_under_parametrization(cls: type[nn.Module]) -> type[nn.Module]:
    """A parametrized class is made for one instance, and undone by taking its base: ours has to be that base."""
    made = _on_bases(cls, tuple(framed_class(base) for base in cls.__bases__))
    made._autoprec_made_from = cls  # type: ignore[attr-defined]
    return made


def _without_frames(cls: type) -> type:
    if "_autoprec_original" in vars(cls):
        return vars(cls)["_autoprec_original"]
    made_from = vars(cls).get("_autoprec_made_from")
    if made_from is not None and _properties(cls) == _properties(made_from):
        return made_from  # the same tensors are parametrized
    if not _in_frames(cls) or _calls_super(cls):
        return cls
    return _on_bases(cls, tuple(_without_frames(base) for base in cls.__bases__))


def _properties(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if isinstance(value, property)}


def _calls_super(cls: type) -> bool:
    """Whether methods hold on to this very class, which a copy of it would then not be."""
    return any("__class__" in f.__code__.co_freevars for f in vars(cls).values() if isinstance(f, FunctionType))


def _on_bases(cls: type, bases: tuple[type, ...]) -> type:
    left_out = ("__dict__", "__weakref__", "_autoprec_made_from")
    namespace = {name: value for name, value in vars(cls).items() if name not in left_out}
    return type(cls)(cls.__name__, bases, namespace)


@contextmanager
def framed(model: nn.Module, make: MakeFrame, neutral: Frame, restore_outputs: bool = True) -> Iterator[dict[str, str]]:
    """Runs the body with every module of the model in the frames that ``make`` gives, then restores what was there.

    Yields:
        FQN → reason, of modules that can't run in frames.
    """
    before = {module: vars(module).get(STATE) for module in model.modules()}
    refused: dict[str, str] = {}
    try:
        for fqn, module in model.named_modules():
            names = framed_methods(original_class(module))
            frames = {name: make(fqn, module, name) for name in names}
            reason = set_frames(module, FrameState(frames, neutral, restore_outputs))
            if reason:
                refused[fqn] = reason
        yield refused
    finally:
        for module, state in before.items():
            if state is None:
                remove(module)
            else:
                vars(module)[STATE] = state
