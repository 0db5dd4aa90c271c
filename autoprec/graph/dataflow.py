"""Follows values through a running model: every torch call in order, with the tensors it read and made.

A recording (:mod:`autoprec.graph.record`) names the calls that are sites; the mode below it also sees those that
aren't: integer arithmetic, ``x.T``, ``idx.view(-1)``, ``.item()``.  Tensors are told apart by identity, and nothing is
kept alive: what is known of a tensor goes when the tensor goes.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoprec.frames.names import is_inplace
from autoprec.graph.inputs import Run
from autoprec.graph.record import Call, Recording, record
from autoprec.graph.site import Site
from autoprec.rulebook.opnames import canonical_op

#: Calls that draw random numbers: to be repeated they need the generator's state.
RANDOM_OPS = frozenset({
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    "native_dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "rand", "randn", "randint",
    "randperm", "rand_like", "randn_like", "randint_like", "rrelu", "gumbel_softmax", "poisson", "binomial", "random",
    "cauchy", "geometric", "log_normal", "scaled_dot_product_attention", "multi_head_attention_forward", "lstm",
    "gru", "rnn_tanh", "rnn_relu", "fractional_max_pool2d", "fractional_max_pool3d",
})  # fmt: skip

#: Explicit conversions: on an fp32 tensor they return the tensor itself, and the author's word would be lost.
CASTS = frozenset({"float", "to", "type", "type_as", "double"})

#: Functions with a positional ``inplace`` argument, the last.
_INPLACE_FLAG = frozenset(
    {"relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardtanh", "hardswish"}
)

#: Questions that no value answers; ``dtype`` isn't among them, since code may act on it.
_METADATA = frozenset({
    "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "ndimension", "element_size",
    "data_ptr", "storage_offset", "get_device", "__len__", "__hash__", "__format__", "__repr__", "is_signed",
    "untyped_storage", "is_same_size", "is_inference", "requires_grad_", "retain_grad", "register_hook",
    "shape", "device", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_mps",
    "layout", "requires_grad", "grad_fn", "is_leaf", "itemsize", "nbytes", "is_nested", "is_sparse_csr", "is_xla",
    "is_xpu", "_base", "_version", "names", "output_nr",
})  # fmt: skip

#: Code that looks at tensors on its own account while a model is recorded.
_BOOKKEEPERS = (
    "autoprec.graph.record",
    "autoprec.graph.flops",
    "autoprec.frames.outputs",
    "torch.utils.flop_counter",
    "torch.utils._pytree",
)

T = TypeVar("T")


class TensorMap(Generic[T]):
    """Tensor → value, by identity, for as long as the tensor lives."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}

    def get(self, tensor: torch.Tensor) -> T | None:
        found = self._values.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __setitem__(self, tensor: torch.Tensor, value: T) -> None:
        key = id(tensor)
        values = self._values

        def forget(dead: weakref.ref[torch.Tensor]) -> None:
            entry = values.get(key)
            if entry is not None and entry[0] is dead:
                del values[key]

        values[key] = (weakref.ref(tensor, forget), value)

    def pop(self, tensor: torch.Tensor) -> None:
        if self.get(tensor) is not None:
            del self._values[id(tensor)]

    def __len__(self) -> int:
        return len(self._values)


@dataclass
class Step:
    """One torch call.

    Args:
        site: the site it belongs to; None for a call that chooses no precision.
        name: as spelled: ``add_``, ``__getitem__``; a property read is ``__get__``.
        op: canonical name.
        func, args, kwargs: as called.
        out: what it returned.
        attribute: name of the property read.
        before: the first argument as it was, of a call that writes it.
        random_state: of the generator before a call that draws from it.
        written: the arguments of a cast as the author wrote them; empty where the source isn't at hand.
    """

    site: Site | None
    name: str
    op: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any = None
    attribute: str = ""
    before: torch.Tensor | None = None
    random_state: RandomState | None = None
    written: str = ""

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """Tensors among the arguments, of any dtype."""
        return [*tensors(self.args), *tensors(self.kwargs)]

    @cached_property
    def outputs(self) -> list[torch.Tensor]:
        """Tensors in the result, of any dtype."""
        return tensors(self.out)

    @property
    def writes(self) -> bool:
        """Whether the call wrote its first argument."""
        return self.before is not None

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the call on other arguments, with the random numbers it drew."""
        if self.random_state is None:
            return self.func(*args, **kwargs)
        with self.random_state.replayed():
            return self.func(*args, **kwargs)


class RandomState:
    """The state of the generators that a call on these tensors may draw from."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self._devices = sorted({t.device.index or 0 for t in inputs if t.device.type == "cuda"})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(i) for i in self._devices]

    def replayed(self) -> Any:
        """Context in which the generators start from this state; afterwards they are as before."""
        return _replayed(self)


class _replayed:  # noqa: N801 (a context manager, read as a verb)
    def __init__(self, state: RandomState) -> None:
        self._state = state
        self._fork = torch.random.fork_rng(state._devices)

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.set_rng_state(self._state._cpu)
        for index, state in zip(self._state._devices, self._state._cuda, strict=True):
            torch.cuda.set_rng_state(state, index)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or the result of a call."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def leaves(tree: Any) -> Iterator[Any]:
    """Everything in tuples, lists, dicts and slices, in order."""
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    elif isinstance(tree, slice):
        yield from (tree.start, tree.stop, tree.step)
    else:
        yield tree


def replace_tensors(tree: Any, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with ``value(t)`` for each tensor in it."""
    if isinstance(tree, torch.Tensor):
        return value(tree)
    if isinstance(tree, (tuple, list)):
        items = [replace_tensors(item, value) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: replace_tensors(item, value) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(replace_tensors(item, value) for item in (tree.start, tree.stop, tree.step)))
    return tree


def follow(model: nn.Module, run: Run, see: Callable[[Step], None], grad: bool = False) -> Recording:
    """Runs the model as :func:`autoprec.graph.record.record` does and shows every torch call of the recorded run.

    Args:
        model: any module; stays as it is.
        run: see :func:`autoprec.graph.inputs.as_run`.
        see: gets each call, in order, right after it ran and before the next.
        grad: run with gradients enabled.
    """
    watcher = _Watcher(see, alias_casts=not grad)
    runs = 0

    def watched(model: nn.Module) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:  # only fills caches
            run(model)
            return
        with watcher:
            run(model)
        watcher.flush()

    return record(model, watched, watcher.name, grad=grad)


class _Watcher(TorchFunctionMode):
    """Lies below the recording frames, so that it sees each call with its final arguments before it runs."""

    def __init__(self, see: Callable[[Step], None], alias_casts: bool) -> None:
        super().__init__()
        self._see = see
        self._alias_casts = alias_casts
        self._pending: Step | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in _METADATA or attribute in _METADATA or _is_bookkeeping(sys._getframe(1)):
            return func(*args, **kwargs)
        self.flush()
        step = Step(None, name, canonical_op(name), func, args, kwargs, attribute=attribute)
        if _writes(step):
            step.before = args[0].detach().clone()
        if step.op in RANDOM_OPS:
            step.random_state = RandomState(step.inputs)
        step.out = func(*args, **kwargs)
        if step.op in CASTS:
            step.written = _written_arguments(name)
            if self._alias_casts and isinstance(step.out, torch.Tensor) and step.out is args[0]:
                # The same object can't be both the rounded value and the author's fp32 copy of it.
                step.out = step.out.view_as(step.out)
        self._pending = step
        return step.out

    def name(self, call: Call) -> None:
        """The recorder's observer: the call that just ran is this site."""
        if self._pending is not None:
            self._pending.site = call.site
        self.flush()

    def flush(self) -> None:
        """Shows the call that waits for its name; none comes any more."""
        step, self._pending = self._pending, None
        if step is not None:
            # What the watching computes is no part of the model.
            with torch._C.DisableTorchFunction():
                self._see(step)


def _is_bookkeeping(frame: FrameType) -> bool:
    """Whether the recorder itself asks; ``spy`` is where it makes the model's own call."""
    return frame.f_globals.get("__name__") in _BOOKKEEPERS and frame.f_code.co_name != "spy"


def _writes(step: Step) -> bool:
    if not step.args or not isinstance(step.args[0], torch.Tensor):
        return False
    if is_inplace(step.name):
        return step.name not in ("share_memory_", "set_", "detach_")
    if step.kwargs.get("inplace") is True:
        return True
    return step.op in _INPLACE_FLAG and step.args[-1] is True


def _written_arguments(name: str) -> str:
    """Source text of the arguments of the call of ``.name(…)`` that the nearest user code is in."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "autoprec.")):
        frame = frame.f_back
    if frame is None:
        return ""
    first, last, start, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if first is None or last is None or start is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # before the front is cut: it may be the same line; columns are in bytes
    lines[0] = lines[0][start:]
    # A method on a line of its own starts at its name, without the dot.
    text = "." + b"".join(lines).decode(errors="replace")
    _, call, arguments = text.rpartition(f".{name}(")
    return arguments if call else ""
