"""A task: everything a study needs to train a model again and again from a seed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.errors import TaskError
from autoprec.plan import Mode

#: Whatever the loss takes: a tensor, or tensors in tuples, lists and dicts.
Batch = Any


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its data, loss and optimizer.

    Each callable must give the same result for the same seed: trials are compared on the same batches, from the
    same weights, and a study that is resumed builds everything again.

    Args:
        name: names the default study and its folder.
        build_model: ``build_model(seed)`` gives a new model on the CPU, in fp32.
        batches: ``batches(seed)`` gives batches on the CPU; when they run out they start again.
        loss: ``loss(model, batch)`` gives one scalar.
        optimizer: ``optimizer(params)`` gives a new optimizer; not needed for inference.
        samples_per_step: samples in a batch; 0 when not said.
        tokens_per_step: tokens in a batch; 0 where there are none.
        checkpoint: trained weights (``.safetensors``, or a state dict that ``torch.load(weights_only=True)`` takes);
            a study starts from them and trains no checkpoint of its own.
        mode: ``training``, or ``inference``: then the loss is only evaluated, under ``no_grad`` and ``eval()``.
        data: names the data set and its version; part of what a study is recognised by.
    """

    name: str
    build_model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterable[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    samples_per_step: int = 0
    tokens_per_step: int = 0
    checkpoint: str | PathLike[str] | None = None
    mode: Mode = "training"
    data: str = ""

    def __post_init__(self) -> None:
        """Refuse at once what would fail only after the first minutes of a study."""
        if not self.name or not isinstance(self.name, str):
            raise TaskError(f"Task.name is {self.name!r}; a task needs a name that isn't empty")
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
