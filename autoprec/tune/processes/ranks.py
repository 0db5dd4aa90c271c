"""Trials that span the processes of a ``torchrun`` job: rank 0 runs the study, the others do each step with it.

Optuna's ``TorchDistributedTrial`` runs the objective on every rank and hands rank 0's parameters and pruning decisions
round.  Here a trial decides more than that, and by the clock: when to stop, how often to time, how many calls make a
reading.  Two ranks that decide differently wait for each other for ever.  So nothing is decided twice: rank 0 runs the
bench as it is, and each model built and each step made there is an order that the others follow.  A rank that raises
fails the trial, and not the job.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from enum import IntEnum
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from autoprec.backends.registry import reset_backends
from autoprec.errors import StudyError, TaskError
from autoprec.plan import Plan
from autoprec.tasks import Batch, Task
from autoprec.tune.processes.team import Failure, Team, Wrap, data_parallel, is_distributed, is_leader
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.outcome import WORST_GAP, Outcome
from autoprec.tune.trials.trainer import Stop, Trainer, own_random_state

_log = logging.getLogger("autoprec")

__all__ = ["RanksBench", "follow", "is_distributed", "is_leader"]

#: How far apart the ranks' data seeds are: further than any two seeds of a study.
_RANK_SEEDS = 100_000

_T = TypeVar("_T")


class _Order(IntEnum):
    """What the leader says, with the numbers that follow."""

    END = 0  # then shared: the result
    BUILD = 1  # trainer; then shared: plan, jitter, trainers that are gone
    RESTORE = 2  # trainer
    SEED = 3  # seed
    STEP = 4  # trainer, is_agreed, seed, steps, index: of the batch
    RESET = 5
    CHECK = 6


class RanksBench(Bench):
    """A bench whose steps all ranks make, as rank 0 has it.

    Losses are means over the ranks, each of which has data of its own; speed is rank 0's time of the common step.
    Runs from fresh weights are rank 0's alone, as the checkpoint's training was.

    Args:
        bench: what rank 0 would run alone.
        wrap: makes a rank's model part of the team's; the default is ``DistributedDataParallel``.  All ranks must be
            given the same one.

    Attributes:
        isolation: why no trial has a process of its own.
    """

    isolation = "none: under torchrun the ranks are the processes; torchrun --max-restarts starts them again"

    def __init__(self, bench: Bench, *, wrap: Wrap = data_parallel) -> None:
        public = {field.name: getattr(bench, field.name) for field in fields(Bench) if not field.name.startswith("_")}
        super().__init__(**public)
        self._team = Team(self.device, wrap)
        self._places: dict[int, tuple[int, int, int]] = {}
        self._num_built = 0
        self._gone: list[int] = []
        self._is_together, self._is_open = False, True
        names = ("checkpoint", "seed", "budget")
        self._team.share({name: public[name] for name in names})

    def trial(self, plan: Plan, seed: int | None = None) -> Outcome:
        """Measure one plan; that any rank raises is its outcome."""
        self.reference(self.data_seed if seed is None else seed, self.effort.steps)
        self._team.tell(_Order.RESET)
        start = time.monotonic()
        try:
            return self._together(lambda: super(RanksBench, self).trial(plan, seed), StudyError)
        except StudyError as exc:
            seconds = time.monotonic() - start
            return Outcome(state="failed", loss_gap=WORST_GAP * self.budget, seconds=seconds, note=str(exc))

    def gap(self, plan: Plan, seed: int, steps: int) -> float:
        """Relative loss gap of a plan on a data seed; NaN if it diverges, or if any rank raises."""
        self.reference(seed, steps)
        self._team.tell(_Order.RESET)
        try:
            return self._together(lambda: super(RanksBench, self).gap(plan, seed, steps), StudyError)
        except Exception as exc:
            _log.warning("data seed %d counts as diverged: %s", seed, exc)
            return math.nan

    def speeds(self, *args: Any, **kwargs: Any) -> Any:
        """Step times of plans against fp32; see :meth:`Bench.speeds`."""
        return self._together(lambda: super(RanksBench, self).speeds(*args, **kwargs), StudyError)

    def noise(self, seeds: Sequence[int], jitter: float = 1e-6) -> float:
        """The task's own chaos; see :meth:`Bench.noise`."""
        return self._together(lambda: super(RanksBench, self).noise(seeds, jitter), TaskError)

    def measure_step_s(self, steps: int = 3) -> float:
        """Median seconds of an fp32 step that all ranks make, now."""
        return self._together(lambda: super(RanksBench, self).measure_step_s(steps), TaskError)

    def reference(self, seed: int, steps: int) -> list[float]:
        """The fp32 run's losses on a data seed; run once, as long as it is remembered."""
        if (seed, steps) in self._references:
            return super().reference(seed, steps)
        return self._together(lambda: super(RanksBench, self).reference(seed, steps), TaskError)

    def trainer(self, plan: Plan | None, jitter: float = 0.0) -> Trainer:
        """A model that all ranks train."""
        here = self._here(plan)  # may itself train a little
        self._num_built += 1
        number, gone, self._gone = self._num_built, self._gone, []
        self._team.tell(_Order.BUILD, number)
        self._team.share((here, jitter, gone))
        try:
            inner = super().trainer(plan, jitter)
            _join(self._team, number, inner)
        except Exception as exc:
            self._team.fail(exc)
            raise
        leader = _Leader(inner, self._team, number, self._places)
        weakref.finalize(leader, self._forget, number).atexit = False
        return leader

    def _forget(self, number: int) -> None:
        self._team.leave(number)
        self._gone.append(number)  # the others are told at the next order that has room for it

    def batches(self, seed: int, steps: int) -> list[Batch]:
        """Rank 0's own batches."""
        is_new = (seed, steps) not in self._batches
        batches = super().batches(seed, steps)
        if is_new:
            # each an object of its own: it is known by its id
            batches[:] = map(copy.copy, batches)
            self._places.update({id(batch): (seed, steps, index) for index, batch in enumerate(batches)})
        return batches

    def close(self, result: Any = None) -> None:
        """Let the other ranks go, with what their :func:`follow` returns; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._team.tell(_Order.END)
            self._team.share(result)
            self._team.disband()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error the process ends, and torchrun ends the others
            self.close()

    def _together(self, call: Callable[[], _T], blame: type[Exception]) -> _T:
        """The result of a call, if no rank raised.

        Raises:
            Exception: this rank's own, or as ``blame`` what another rank raised first.
        """
        if self._is_together:  # asked for within another call, which looks after it
            return call()
        self._is_together = True
        result, error = None, None
        try:
            result = call()
        except Exception as exc:
            error = exc
        finally:
            self._is_together = False
        failure = self._check()
        if failure is not None and failure.rank != self._team.rank:
            raise blame(f"rank {failure.rank} raised {failure.error}") from error
        if error is not None:
            raise error
        return cast("_T", result)

    def _check(self) -> Failure | None:
        self._team.tell(_Order.CHECK)
        failure = self._team.check()
        if failure is not None:
            self._baseline = None
            self._references.clear()  # what the others didn't take part in isn't a mean
        return failure


class _Leader(Trainer):
    """A trainer whose steps are orders.

    Args:
        inner: made already.
        team: of the ranks.
        number: of the trainer, the same on all ranks.
        places: id of a batch → where the ranks find their own.
    """

    def __init__(self, inner: Trainer, team: Team, number: int, places: dict[int, tuple[int, int, int]]) -> None:
        vars(self).update(vars(inner))
        self._team, self._number, self._places = team, number, places
        self._is_agreed = False

    def restore(self) -> None:
        self._team.tell(_Order.RESTORE, self._number)
        super().restore()

    def losses(self, batches: Iterable[Batch], seed: int, stop: Stop | None = None) -> list[float]:
        self._team.tell(_Order.SEED, seed)
        self._is_agreed = True
        try:
            return super().losses(batches, seed, stop)
        finally:
            self._is_agreed = False

    def step(self, batch: Batch) -> Tensor:
        self._team.tell(_Order.STEP, self._number, int(self._is_agreed), *self._places[id(batch)])
        if not self._is_agreed:
            return self._own_step(batch)
        try:
            loss = float(self._own_step(batch))
        except Exception:
            self._team.mean(math.nan)  # the others wait for this rank, whatever it has come to
            raise
        return torch.tensor(self._team.mean(loss), dtype=torch.float64)

    def _own_step(self, batch: Batch) -> Tensor:
        try:
            return super().step(batch)
        except Exception as exc:
            self._team.fail(exc)
            raise


class _Follower:
    """Does what the leader says; what it can't do it keeps to itself until it is asked."""

    def __init__(self, team: Team, bench: Bench) -> None:
        self._team, self._bench = team, bench
        self._trainers: dict[int, Trainer] = {}

    def obey(self, order: int, first: int, *numbers: int) -> bool:
        """Do as told; False at the end."""
        match order:
            case _Order.BUILD:
                self._build(first, *self._team.share())
            case _Order.RESTORE:
                self._try(lambda: self._trainers[first].restore())
            case _Order.SEED:
                torch.manual_seed(self._seed(first))
            case _Order.STEP:
                self._step(first, *numbers)
            case _Order.RESET:
                reset_backends()
            case _Order.CHECK:
                if self._team.check() is not None:
                    self._trainers.clear()
        return order != _Order.END

    def _build(self, number: int, plan: Plan | None, jitter: float, gone: Iterable[int]) -> None:
        for other in gone:
            self._trainers.pop(other, None)
            self._team.leave(other)

        def build() -> None:
            with own_random_state(self._bench.device):
                trainer = self._bench.trainer(plan, jitter)
                _join(self._team, number, trainer)
                self._trainers[number] = trainer

        self._try(build)

    def _step(self, number: int, is_agreed: int, seed: int, steps: int, index: int) -> None:
        loss = math.nan

        def step() -> None:
            nonlocal loss
            batch = self._bench.batches(self._seed(seed), steps)[index]
            if is_agreed:
                loss = float(self._trainers[number].step(batch))
                return
            with own_random_state(self._bench.device):  # a timing in between leaves a run's dropout paired
                self._trainers[number].step(batch)

        self._try(step)
        if is_agreed:
            self._team.mean(loss)

    def _seed(self, seed: int) -> int:
        return seed + _RANK_SEEDS * self._team.rank

    def _try(self, act: Callable[[], None]) -> None:
        if self._team.has_failed:
            return
        try:
            act()
        except Exception as exc:
            self._trainers.clear()
            self._team.fail(exc)


def follow(task: Task, device: torch.device, *, wrap: Wrap = data_parallel) -> Any:
    """What ranks above 0 do: make rank 0's steps on data of their own, until it closes its bench.

    Args:
        task: the same as rank 0's.
        device: of this rank.
        wrap: as rank 0's.

    Returns:
        what rank 0 gave to :meth:`RanksBench.close`.
    """
    team = Team(device, wrap)
    follower = _Follower(team, Bench(task=task, device=device, **team.share()))
    while follower.obey(*team.hear()):
        pass
    result = team.share()
    team.disband()
    return result


def _join(team: Team, number: int, trainer: Trainer) -> None:
    """Let a trainer's loss go through the team's model; its own stays as it is, with its keys."""
    if trainer.optimizer is None:
        return  # nothing is trained, so nothing is shared
    team.join(number, trainer.model)
    loss = trainer.task.loss
    trainer.task = replace(trainer.task, loss=lambda _, batch: loss(team.model(number), batch))
