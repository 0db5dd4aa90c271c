"""A bench whose trials are expendable: they run in a worker process, which is replaced when it dies, hangs or leaks."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from autoprec.errors import StudyError, UsageError
from autoprec.plan import Plan
from autoprec.tasks import Batch, Task
from autoprec.tune.processes.child import BOOT, FP32_CALLS, Call, Reply, pack
from autoprec.tune.processes.process import ChildProcess, Death
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.elsewhere import Estimator
from autoprec.tune.trials.outcome import WORST_GAP, Effort, Outcome
from autoprec.tune.trials.scratch import FromScratch
from autoprec.tune.trials.speed import Speed
from autoprec.tune.trials.trainer import Trainer

_log = logging.getLogger("autoprec")

#: A call may take this many times what its steps took in fp32, and at least so many seconds: kernels may be compiled.
_SLOWDOWN, _MIN_LIMIT_S = 20.0, 120.0
_START_LIMIT_S = 600.0
_TRAINS = "trains in fp32"
_NOT_THE_PLAN = "{method} of task {task!r} ended its process twice ({note}); it {does}: run that alone to see why"


class WorkerBench:
    """Runs a bench in a process of its own.

    A trial never raises for what its plan did.  A process that died, that hung or that is left in another state than
    it started in is replaced before the next call.

    Args:
        bench: what to run; its caches stay here, but for the reference losses.
        spec: the task's name, where it has one; without, the task itself is pickled.
        trial_timeout: seconds that a trial may take; None is 20 times what its steps take in fp32, and at least 120.
            Starting the process, loading the data and building the fp32 model aren't part of it.

    Attributes:
        isolation: ``process``, or ``none: …`` with the reason why trials run in this process.
        num_started: worker processes so far.
        startup_s: seconds that the last one took to start.
    """

    def __init__(self, bench: Bench, *, spec: str | None = None, trial_timeout: float | None = None) -> None:
        if trial_timeout is not None and not trial_timeout > 0:
            raise UsageError(f"trial_timeout is {trial_timeout} seconds; it must be above 0, or None")
        self.trial_timeout = trial_timeout
        self.isolation = "process"
        self.num_started = 0
        self.startup_s = 0.0
        self._bench, self._spec = bench, spec
        self._child: ChildProcess | None = None
        self._is_ready = self._is_warm = False
        self._asked_at = 0.0
        self._step_s: float | None = None
        if os.name != "posix" or not sys.executable:
            self._give_up("worker processes need a POSIX system and a Python executable")
        else:
            self._start()

    # What trials share is the bench's.

    @property
    def task(self) -> Task:
        return self._bench.task

    @property
    def checkpoint(self) -> Checkpoint:
        return self._bench.checkpoint

    @property
    def device(self) -> torch.device:
        return self._bench.device

    @property
    def seed(self) -> int:
        return self._bench.seed

    @property
    def budget(self) -> float:
        return self._bench.budget

    @property
    def data_seed(self) -> int:
        return self._bench.data_seed

    @property
    def effort(self) -> Effort:
        return self._bench.effort

    @effort.setter
    def effort(self, effort: Effort) -> None:
        self._bench.effort = effort

    # What isn't a trial is made here, in this process.

    def trainer(self, plan: Plan | None, jitter: float = 0.0) -> Trainer:
        return self._bench.trainer(plan, jitter)

    def batches(self, seed: int, steps: int) -> list[Batch]:
        return self._bench.batches(seed, steps)

    def estimator(self) -> Estimator:
        return self._bench.estimator()

    def trial(self, plan: Plan, seed: int | None = None) -> Outcome:
        """Measure one plan; see :meth:`Bench.trial`.  That its process died or hung is its outcome.

        Raises:
            AutoprecError: the task fails in fp32.
        """
        if not self._has_process():
            return self._bench.trial(plan, seed)
        # what fp32 does is the task's fault, so it comes first
        self.reference(self.data_seed if seed is None else seed, self.effort.steps)
        self._warm_up()
        start = time.monotonic()
        answer = self._ask("trial", (plan, seed), self._limit_s(self._trial_steps()))
        if isinstance(answer, Death):
            return Outcome(
                state=answer.state,
                loss_gap=WORST_GAP * self.budget,
                seconds=time.monotonic() - start,
                note=answer.note,
            )
        outcome: Outcome = _value(answer)
        if answer.leaks:
            note = f"{', '.join(answer.leaks)}: its process was replaced"
            outcome = replace(outcome, note=f"{outcome.note}; {note}" if outcome.note else note)
        return outcome

    def gap(self, plan: Plan, seed: int, steps: int) -> float:
        """Relative loss gap of a plan on a data seed; NaN if it diverges, raises, or ends its process twice."""
        if not self._has_process():
            return self._bench.gap(plan, seed, steps)
        self.reference(seed, steps)
        try:
            return self._surely("gap", (plan, seed, steps), "trains a plan", lambda: self._limit_s(2 * steps))
        except StudyError as exc:
            _log.warning("data seed %d counts as diverged: %s", seed, exc)
            return float("nan")

    def from_scratch(self, plan: Plan, limit_s: float) -> FromScratch:
        """The plan's loss gap from fresh weights; as diverged if it raises or ends its process twice."""
        if not self._has_process():
            return self._bench.from_scratch(plan, limit_s)
        try:
            return self._surely("from_scratch", (plan, limit_s), "trains a plan", lambda: 2 * limit_s + _MIN_LIMIT_S)
        except StudyError as exc:
            _log.warning("from fresh weights it counts as diverged: %s", exc)
            return FromScratch(gap=None, chaos=0.0, steps=0)

    def speeds(self, plans: Mapping[str, Plan], rounds: int, seed: int = 0) -> Mapping[str, Speed]:
        """Step times of plans against fp32, measured or estimated."""
        if not self._has_process():
            return self._bench.speeds(plans, rounds, seed)
        steps = 3 * rounds * (len(plans) + 2)
        return self._surely("speeds", (dict(plans), rounds, seed), "times plans", lambda: self._limit_s(steps))

    def noise(self, seeds: Sequence[int], jitter: float = 1e-6) -> float:
        """Root mean square of the gap that the task's own chaos makes."""
        if not self._has_process():
            return self._bench.noise(seeds, jitter)
        steps = 2 * self.effort.steps * len(seeds)
        return self._surely("noise", (tuple(seeds), jitter), _TRAINS, lambda: self._fp32_limit_s(steps))

    def measure_step_s(self, steps: int = 3) -> float:
        """Median seconds of an fp32 step, now."""
        if not self._has_process():
            return self._bench.measure_step_s(steps)
        step_s: float = self._surely("measure_step_s", (steps,), _TRAINS, lambda: self._fp32_limit_s(2 * steps))
        self._step_s = step_s
        return step_s

    def reference(self, seed: int, steps: int) -> list[float]:
        """The fp32 run's losses on a data seed; run once."""
        if not self._has_process():
            return self._bench.reference(seed, steps)
        if (seed, steps) not in self._bench._references:
            losses = self._surely("reference", (seed, steps), _TRAINS, lambda: self._fp32_limit_s(steps))
            self._bench._references[seed, steps] = losses
        return self._bench._references[seed, steps]

    def close(self) -> None:
        """End the process; another call starts a new one."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _surely(self, method: str, args: tuple[Any, ...], does: str, limit_s: Callable[[], float | None]) -> Any:
        """The result of a call that is no trial; made once more in a new process if the first dies.

        Raises:
            AutoprecError: it raised, or it ended two processes.
        """
        answer: Reply | Death = Death("crashed", "")
        for _ in range(2):
            if method not in FP32_CALLS:
                self._warm_up()
            answer = self._ask(method, args, limit_s())  # known only now
            if isinstance(answer, Reply):
                for leak in answer.leaks:
                    _log.info("%s: %s; its process was replaced", method, leak)
                return _value(answer)
            _log.info("%s: %s", method, answer.note)
        note = answer.note if isinstance(answer, Death) else ""
        raise StudyError(_NOT_THE_PLAN.format(method=method, task=self.task.name, note=note, does=does))

    def _warm_up(self) -> None:
        """Let a new process load the data and build the fp32 model, which is no part of a plan's time."""
        if self._has_process() and not self._is_warm:
            self.measure_step_s(1)

    def _ask(self, method: str, args: tuple[Any, ...], limit_s: float | None) -> Reply | Death:
        if not self._has_process() or self._child is None:
            raise StudyError(f"{method} of task {self.task.name!r} has no process to run in: {self.isolation}")
        answer: Reply | Death = self._child.ask(Call(method=method, args=args, effort=self.effort), limit_s)
        if isinstance(answer, Reply):
            self._bench._references.update(answer.references)
            self._is_warm = self._is_warm or method == "measure_step_s"
        if isinstance(answer, Death) or answer.leaks:
            self._start()  # now, so that it is there when it is needed
        return answer

    def _has_process(self) -> bool:
        """Whether there is a process that waits for calls; started anew if it died between them.

        Raises:
            StudyError: it started before, and doesn't any more.
        """
        if self.isolation != "process":
            return False
        answer: Reply | Death = Death("crashed", "")
        for _ in range(2):
            if self._child is None or not self._child.is_alive():
                self._start()
            if self._child is None:
                return False
            if self._is_ready:
                return True
            answer = self._child.answer(_START_LIMIT_S)
            if isinstance(answer, Reply):
                break
        if isinstance(answer, Reply) and answer.error is None:
            self._is_ready, self.startup_s = True, answer.value - self._asked_at
            return True
        why = answer.note if isinstance(answer, Death) else str(answer.error)
        if self.startup_s:
            raise StudyError(f"the worker process doesn't start any more ({why}); what is finished is kept")
        self._give_up(f"a worker process doesn't start ({why})")
        return False

    def _start(self) -> None:
        self.close()
        self._is_ready, self._is_warm, self._asked_at = False, False, time.monotonic()
        try:
            packed = pack(self._bench, self._spec)
        except Exception as exc:  # whatever an object's own pickling raises
            self._give_up(f"the task can't be sent to another process ({type(exc).__name__}: {exc})")
            return
        self._child = ChildProcess(BOOT, packed, _waits_for_a_device)
        self.num_started += 1

    def _give_up(self, why: str) -> None:
        self.close()
        self.isolation = f"none: {why}"
        _log.warning("trials run in this process, where a crash ends the study: %s", why)

    def _trial_steps(self) -> int:
        return 2 * self.effort.steps + 3 * self.effort.rounds

    def _fp32_limit_s(self, steps: int) -> float | None:
        """The same for the task as it is, which may have to load its data first."""
        return None if self._step_s is None else max(_START_LIMIT_S, _SLOWDOWN * self._step_s * steps)

    def _limit_s(self, steps: int) -> float | None:
        """Seconds that so many steps of a plan may take; None before a step's time is known."""
        if self.trial_timeout is not None:
            return self.trial_timeout * max(1.0, steps / self._trial_steps())
        return None if self._step_s is None else max(_MIN_LIMIT_S, _SLOWDOWN * self._step_s * steps)


def _waits_for_a_device(call: str) -> bool:
    """Another study's timing may last: a trial that waits for it (:mod:`autoprec.tune.studies.lock`) doesn't hang."""
    return call.startswith("hold (lock.py:")


def _value(reply: Reply) -> Any:
    if reply.error is not None:
        reply.error.add_note(f"In the worker process:\n{reply.trace.rstrip()}")
        raise reply.error
    return reply.value
