"""A task: everything a study needs to train a model again and again from a seed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autoprec.errors import TaskError
from autoprec.plan import Mode

#: Whatever the loss takes: a tensor, or tensors in tuples, lists and dicts.
Batch = Any

#: Whether a larger or a smaller metric is better.
Direction = Literal["minimize", "maximize"]

#: Of a task that has a metric in its place; no other task may leave it out.
_NO_LOSS: Any = None


@dataclass(frozen=True, slots=True)
class _MetricAsLoss:
    """Stands where a task has no loss: what calls the model through it sees the same model."""

    metric: Callable[[nn.Module, Batch], float | Tensor]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return torch.as_tensor(self.metric(model, batch))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data, loss and optimizer.

    Each callable must give the same result for the same seed: trials are compared on the same batches, from the
    same weights, and a study that is resumed builds everything again.

    Args:
        name: names the default study and its folder.
        build_model: ``build_model(seed)`` gives a new model on the CPU, in fp32.
        batches: ``batches(seed)`` gives batches on the CPU; when they run out they start again.
        loss: ``loss(model, batch)`` gives one scalar.  An inference task with a metric may leave it out; with it, how
            much each format hurts is scored by its gradient, which says more than the outputs alone.
        optimizer: ``optimizer(params)`` gives a new optimizer; not needed for inference.
        samples_per_step: samples in a batch; 0 when not said.
        tokens_per_step: tokens in a batch; 0 where there are none.
        checkpoint: trained weights (``.safetensors``, or a state dict that ``torch.load(weights_only=True)`` takes);
            a study starts from them and trains no checkpoint of its own.
        mode: ``training``, or ``inference``: then the loss or the metric is only evaluated, under ``no_grad`` and
            ``eval()``.
        metric: ``metric(model, batch)`` gives one number, such as an accuracy, that an inference task is judged by in
            place of its loss.
        direction: whether the metric is better when it is larger (``maximize``) or smaller (``minimize``).
        data: names the data set and its version; part of what a study is recognised by.
    """

    name: str
    build_model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterable[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor] = _NO_LOSS
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    samples_per_step: int = 0
    tokens_per_step: int = 0
    checkpoint: str | PathLike[str] | None = None
    mode: Mode = "training"
    data: str = ""
    metric: Callable[[nn.Module, Batch], float | Tensor] | None = None
    direction: Direction = "minimize"

    def __post_init__(self) -> None:
        """Refuse at once what would fail only after the first minutes of a study."""
        if not self.name or not isinstance(self.name, str):
            raise TaskError(f"Task.name is {self.name!r}; a task needs a name that isn't empty")
        self._check_metric()
        if self.metric is not None and (self.loss is None or isinstance(self.loss, _MetricAsLoss)):
            object.__setattr__(self, "loss", _MetricAsLoss(self.metric))
        for field in ("build_model", "batches", "loss"):
            if not callable(getattr(self, field)):
                raise TaskError(f"task {self.name!r}: {field} is {getattr(self, field)!r}, which can't be called")
        if self.mode not in ("training", "inference"):
            raise TaskError(f"task {self.name!r}: mode is {self.mode!r}; allowed: 'training', 'inference'")
        if self.mode == "training" and not callable(self.optimizer):
            raise TaskError(
                f"task {self.name!r}: optimizer is {self.optimizer!r}; a training task needs optimizer(params), for "
                "example optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4), or mode='inference'"
            )

    def _check_metric(self) -> None:
        if self.direction not in ("minimize", "maximize"):
            raise TaskError(
                f"task {self.name!r}: direction is {self.direction!r}; allowed: 'minimize', 'maximize', of the metric"
            )
        if self.metric is None:
            if self.direction == "maximize":
                raise TaskError(
                    f"task {self.name!r}: direction is 'maximize', and there is no metric: a loss is minimized. Give "
                    "metric=, a function of (model, batch), in an inference task"
                )
            return
        if not callable(self.metric):
            raise TaskError(f"task {self.name!r}: metric is {self.metric!r}, which can't be called")
        if self.mode != "inference":
            raise TaskError(
                f"task {self.name!r}: a metric judges an inference task (mode='inference'); a training task is judged "
                "by the loss that it trains on"
            )

    @property
    def has_loss(self) -> bool:
        """Whether ``loss`` is the task's own, which has gradients, and not the metric in its place."""
        return not isinstance(self.loss, _MetricAsLoss)

    @property
    def measured(self) -> str:
        """What its runs are compared by, in a word: ``loss`` or ``metric``."""
        return "loss" if self.metric is None else "metric"

    def evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        """The number that runs are compared by: the metric where there is one, else the loss."""
        return self.loss(model, batch) if self.metric is None else torch.as_tensor(self.metric(model, batch))

    def stream(self, seed: int) -> Iterator[Batch]:
        """Batches without end: those of ``batches(seed)``, again and again."""
        while True:
            empty = True
            for batch in self.batches(seed):
                empty = False
                yield batch
            if empty:
                raise TaskError(f"task {self.name!r}: batches({seed}) gave no batch")

    def throughput_unit(self) -> tuple[str, int]:
        """What a step counts, and how many: tokens, else samples, else steps."""
        if self.tokens_per_step:
            return "tokens", self.tokens_per_step
        return ("samples", self.samples_per_step) if self.samples_per_step else ("steps", 1)
