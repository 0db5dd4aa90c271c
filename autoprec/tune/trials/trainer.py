"""One model in training (or in evaluation), and its losses on given batches."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autoprec.convert import convert
from autoprec.errors import TaskError, UsageError
from autoprec.plan import Plan
from autoprec.scaler import BoundedGradScaler
from autoprec.tasks import Batch, Task
from autoprec.tasks.task import Direction
from autoprec.tune.studies.lock import device_lock
from autoprec.tune.trials.checkpoint import Checkpoint

#: Called with the losses so far; True ends the run.
Stop = Callable[[list[float]], bool]


class Trainer:
    """A freshly built model at the checkpoint, converted if there is a plan.

    Args:
        task: what to train.
        checkpoint: where every run starts; None is the seed's own weights.
        plan: the mix; None leaves the model as it is.
        device: where it trains.
        seed: of the model.
        jitter: each weight is multiplied by 1 ± jitter: what that alone changes is the task's own chaos.

    Attributes:
        num_skipped: steps the loss scaler skipped so far.
        step_seconds: of the steps of :meth:`losses` so far.
    """

    def __init__(
        self,
        task: Task,
        checkpoint: Checkpoint | None,
        plan: Plan | None,
        *,
        device: torch.device,
        seed: int,
        jitter: float = 0.0,
    ) -> None:
        self.task, self.device, self.is_training = task, device, task.mode == "training"
        model = task.build_model(seed)
        if not isinstance(model, nn.Module):
            raise TaskError(f"task {task.name!r}: build_model({seed}) returned a {type(model).__name__}, not a Module")
        self.model = model.to(device).train(self.is_training)
        self._checkpoint = checkpoint
        if checkpoint is not None:
            load_weights(model, checkpoint.weights, task)
        if jitter:
            _jitter(model, jitter, seed)
        if plan is not None and plan.level != "O0":
            self.model = convert(self.model, plan=plan)
        self.optimizer = None
        if self.is_training and task.optimizer is not None:
            self.optimizer = task.optimizer(self.model.parameters())
            self._load_optimizer()
        scaler = (plan or Plan(rules=())).grad_scaler(device.type)
        self.scaler = scaler if isinstance(scaler, BoundedGradScaler) and scaler.is_enabled() else None
        self.num_skipped = 0
        self.step_seconds: list[float] = []

    def restore(self) -> None:
        """Back to the checkpoint, with the same model."""
        if self._checkpoint is not None:
            load_weights(self.model, self._checkpoint.weights, self.task)
            self._load_optimizer()

    def _load_optimizer(self) -> None:
        if self.optimizer is not None and self._checkpoint is not None and self._checkpoint.optimizer:
            # a copy: an optimizer keeps the tensors it is given, and changes them in place
            self.optimizer.load_state_dict(copy.deepcopy(self._checkpoint.optimizer))

    def step(self, batch: Batch) -> Tensor:
        """One step; the loss before it (in inference the metric, if there is one), detached and not waited for."""
        if self.optimizer is None:
            with torch.no_grad():
                return self.task.evaluate(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, batch)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.num_skipped += self.scaler.found_non_finite(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def finished_step(self, batch: Batch) -> float:
        """One step, waited for; nobody times anything on the device meanwhile."""
        with device_lock(self.device, shared=True):
            start = time.perf_counter()
            loss = float(self.step(batch))
            self.step_seconds.append(time.perf_counter() - start)
        return loss

    def losses(self, batches: Iterable[Batch], seed: int, stop: Stop | None = None) -> list[float]:
        """Train on the batches: the loss of each step.

        Random numbers (dropout) start at ``seed``, so that runs on the same batches are paired in them too.
        """
        torch.manual_seed(seed)
        losses: list[float] = []
        for batch in batches:
            losses.append(self.finished_step(batch))
            if stop is not None and stop(losses):
                break
        return losses

    def stepper(self, batches: Sequence[Batch]) -> Callable[[], Tensor]:
        """A call that does one step on the next of the batches, round and round, for timing."""
        position = 0

        def step() -> Tensor:
            nonlocal position
            position = (position + 1) % len(batches)
            return self.step(batches[position])

        return step


def take_batches(task: Task, seed: int, count: int, device: torch.device) -> list[Batch]:
    """The first ``count`` batches of a data seed, on the device."""
    return [to_device(batch, device) for batch in islice(task.stream(seed), count)]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def load_weights(model: nn.Module, weights: dict[str, Tensor], task: Task) -> None:
    """Load a checkpoint into a new model.

    Raises:
        TaskError: its names or shapes aren't the model's.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as exc:
        raise TaskError(f"task {task.name!r}: the checkpoint doesn't fit the model it builds: {exc}") from exc


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """What a study draws leaves the caller's random numbers as they were."""
    devices: list[Any] = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def relative_gap(losses: Sequence[float], reference: Sequence[float], direction: Direction = "minimize") -> float:
    """How much worse than the reference, relative to it: 0.005 is half a per cent.

    Mean of (loss less reference loss on the same batch) over the mean reference loss, its sign turned round where
    more is better; NaN if a loss isn't finite.

    Args:
        losses: of the candidate; a shorter run is compared on its own steps.
        reference: of the reference, at least as long.
        direction: ``maximize`` for a metric that is better when it is larger.
    """
    if not losses or len(losses) > len(reference):
        raise UsageError(f"{len(losses)} losses can't be compared with {len(reference)} of the reference")
    base = reference[: len(losses)]
    scale = abs(math.fsum(base)) or 1.0
    if not all(map(math.isfinite, losses)):
        return math.nan
    worse, better = math.fsum(losses), math.fsum(base)
    return (better - worse if direction == "maximize" else worse - better) / scale


def _jitter(model: nn.Module, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                sign = torch.randint(0, 2, param.shape, generator=generator, dtype=param.dtype) * 2 - 1
                param.mul_(1 + size * sign.to(param.device))
