"""Where the first value that isn't finite comes from: hooks for one iteration, which change no number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._C import _autograd
from torch.utils._pytree import tree_leaves

from autoprec.errors import UsageError

#: Private to torch; without it an op of the backward is named, and its module isn't.
_sequence_number: Callable[[], int] = getattr(_autograd, "_get_sequence_nr", lambda: -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The first place with a value that isn't finite.

    Args:
        where: ``input`` of the model, ``parameter`` value, ``forward`` of a module, ``loss`` function, or ``backward``.
        op: name of the op's backward, ``SqrtBackward0``; only for ``backward``.
        module: FQN of the innermost module at work; None where that isn't known.
        parameter: FQN of the parameter with such a value, or the first to receive such a gradient.
    """

    where: Literal["input", "parameter", "forward", "loss", "backward"]
    op: str = ""
    module: str | None = None
    parameter: str = ""

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "the model's own forward"
        place = "an unknown module" if self.module is None else place
        reached = f"; the first parameter it reached is {self.parameter!r}" if self.parameter else ""
        return {
            "input": "the model's input isn't finite: look at the data",
            "parameter": f"parameter {self.parameter!r} isn't finite: go back to a checkpoint where it was",
            "forward": f"the forward of {place} gives values that aren't finite from inputs that are",
            "loss": "the loss isn't finite, though the outputs of the model are: look at the loss function",
            "backward": f"{self.op or 'an op'} of {place} gives a gradient that isn't finite{reached}",
        }[self.where]


class Probe:
    """Watches a model from now until :meth:`remove`, for one iteration: forward, loss, backward.

    What ``torch.compile`` compiles isn't looked into: its ops are seen as one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._starts: list[int] = []
        self._calls: list[tuple[int, int, str]] = []
        self._forward: Finding | None = None
        self._backward: Finding | None = None
        self._parameter = ""
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            hook = partial(self._leave, name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    @property
    def finding(self) -> Finding | None:
        """The first place, or None where all was finite."""
        if self._forward:
            return self._forward
        if self._backward:
            return Finding(
                where="backward", op=self._backward.op, module=self._backward.module, parameter=self._parameter
            )
        return Finding(where="backward", parameter=self._parameter) if self._parameter else None

    def watch(self, loss: torch.Tensor) -> None:
        """Look at a loss before its backward, unscaled, and at the gradients when they come."""
        if _all_finite([loss]):
            # inside the model such values may be meant: an additive mask has -inf
            self._forward = None
        elif self._forward is None:
            self._forward = Finding(where="loss")
        for node in _nodes(loss.grad_fn):
            variable = getattr(node, "variable", None)
            if variable is None:
                node.register_hook(partial(self._after_node, node.name(), self._module_of(node)))
            else:
                node.register_prehook(partial(self._at_parameter, self._names.get(id(variable), "")))

    def remove(self) -> None:
        """Take the hooks off; the finding stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # reading a value would break the graph
            self._starts.append(_sequence_number())

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._calls.append((self._starts.pop(), _sequence_number(), name))
        if self._forward is not None or _all_finite(tree_leaves(output)):
            return
        for own, parameter in module.named_parameters(recurse=False):
            if not _all_finite([parameter]):
                self._forward = Finding(where="parameter", parameter=f"{name}.{own}" if name else own, module=name)
                return
        if _all_finite(tree_leaves((args, kwargs))):
            self._forward = Finding(where="forward", module=name)
        elif not name:
            self._forward = Finding(where="input", module=name)

    def _module_of(self, node: Any) -> str | None:
        number = node._sequence_nr()
        around = [call for call in self._calls if call[0] <= number < call[1]]
        return max(around)[2] if around else None

    def _after_node(self, op: str, module: str | None, computed: Any, given: Any) -> None:
        if self._backward is None and not _all_finite(computed) and _all_finite(given):
            self._backward = Finding(where="backward", op=op, module=module)

    def _at_parameter(self, name: str, gradients: Any) -> None:
        if not self._parameter and not _all_finite(gradients):
            self._parameter = name


def diagnose(model: nn.Module, run: Callable[[nn.Module], torch.Tensor], scale: float = 1.0) -> Finding | None:
    """Run one forward and backward and tell where the first value comes from that isn't finite.

    Gradients are left as they were; buffers and random numbers move on as in any forward.

    Args:
        model: the model.
        run: computes a loss, a scalar that needs a gradient.
        scale: the loss scale to look at.

    Returns:
        None where all is finite.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    probe = Probe(model)
    try:
        model.zero_grad(set_to_none=True)
        loss = run(model)
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise UsageError(f"run(model) gave {type(loss).__name__} without a gradient, but must give the loss")
        probe.watch(loss)
        (loss.float() * scale).backward()
    finally:
        probe.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return probe.finding


def _nodes(root: Any) -> Iterable[Any]:
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(new)
        waiting.extend(new)


def _all_finite(values: Iterable[Any]) -> bool:
    tensors = (v.detach() for v in values if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()))
    return all(bool(torch.isfinite(t.coalesce().values() if t.is_sparse else t).all()) for t in tensors)
