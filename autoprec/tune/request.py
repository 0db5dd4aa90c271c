"""What a call of ``tune`` asks for, checked before anything is built."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage

from autoprec.errors import UsageError
from autoprec.target import Target
from autoprec.tasks import Task, load_task
from autoprec.tune.processes.team import is_distributed
from autoprec.tune.sampling.methods import check_method
from autoprec.tune.sampling.objective import Kind, Objective
from autoprec.tune.studies.storage import without_password
from autoprec.tune.trials.prepare import Place, find_place

#: Trials of a study that is given neither a number nor a time.
DEFAULT_TRIALS = 50
#: No study gets so far; with a time limit alone it ends by that.
_UNLIMITED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of one call of :func:`autoprec.tune`, see there; ``started`` is of :func:`time.monotonic`."""

    task: Task
    spec: str
    name: str
    place: Place
    folder: Path
    storage: str | BaseStorage | None
    trials: int
    timeout: float | None
    objective: Objective
    method: str
    workers: int
    trial_timeout: float | None
    isolate: bool
    seed: int
    keep: tuple[str, ...]
    rules: tuple[str | PathLike[str], ...]
    started: float = field(default_factory=time.monotonic)

    @property
    def budget(self) -> float:
        """Largest allowed relative loss gap."""
        return self.objective.budget

    @property
    def task_name(self) -> str | None:
        """What another process loads the task by; None where it was given as an object."""
        return self.spec or None

    def arguments(self) -> dict[str, Any]:
        """Of :func:`make_request`, for another process of the same study."""
        return {
            "task": self.task_name or self.task,
            "target": self.place.target,
            "trials": self.trials,
            "timeout": None if self.timeout is None else self.timeout - (time.monotonic() - self.started),
            "storage": self.storage,
            "study": self.name,
            "max_loss_increase": self.budget,
            "objective": self.objective.kind,
            "min_speedup": self.objective.min_speedup,
            "method": self.method,
            "workers": self.workers,
            "trial_timeout": self.trial_timeout,
            "isolate": self.isolate,
            "seed": self.seed,
            "output_dir": self.folder,
            "keep": self.keep,
            "rules": self.rules,
        }

    def settings(self) -> dict[str, Any]:
        """What the result says of the call."""
        return {
            "task": self.spec or self.task.name,
            "study": self.name,
            "storage": None if self.storage is None else without_password(self.storage),
            "target": self.place.target.name,
            "trials": None if self.trials == _UNLIMITED else self.trials,
            "timeout": self.timeout,
            "method": self.method,
            "objective": self.objective.kind,
            "min_speedup": self.objective.min_speedup,
            "workers": self.workers,
            "trial_timeout": self.trial_timeout,
            "seed": self.seed,
            "keep": list(self.keep),
            "rules": [str(file) for file in self.rules],
        }


def make_request(
    *,
    task: str | Task | None,
    target: str | Target,
    trials: int | None,
    timeout: float | None,
    storage: str | BaseStorage | None,
    study: str | None,
    max_loss_increase: float,
    objective: Kind,
    min_speedup: float | None,
    method: str,
    workers: int,
    trial_timeout: float | None,
    isolate: bool,
    seed: int,
    output_dir: str | PathLike[str] | None,
    keep: Sequence[str],
    rules: Iterable[str | PathLike[str]],
) -> Request:
    """Check the arguments, load the task and find the device.

    Raises:
        TaskError, TargetError, UsageError: an argument can't be used.
    """
    _check_numbers(trials=trials, workers=workers, timeout=timeout, trial_timeout=trial_timeout)
    if not 0 < max_loss_increase < 1:
        raise UsageError(
            f"max_loss_increase is {max_loss_increase}; allowed: above 0 and below 1, such as 0.005 for 0.5%"
        )
    if workers > 1 and is_distributed():
        raise UsageError(f"workers is {workers} under torchrun, where each trial spans the ranks; allowed there: 1")
    check_method(method)
    wanted = Objective(kind=objective, budget=max_loss_increase, min_speedup=min_speedup)
    loaded = load_task(task)
    name = study or loaded.name
    return Request(
        task=loaded,
        spec="" if isinstance(task, Task) else task or loaded.name,
        name=name,
        place=find_place(target),
        folder=Path(output_dir) if output_dir is not None else Path("runs") / name,
        storage=storage,
        trials=trials or (DEFAULT_TRIALS if timeout is None else _UNLIMITED),
        timeout=timeout,
        objective=wanted,
        method=method,
        workers=workers,
        trial_timeout=trial_timeout,
        isolate=isolate,
        seed=seed,
        keep=tuple(keep),
        rules=tuple(rules),
    )


def _check_numbers(*, trials: int | None, workers: int, timeout: float | None, trial_timeout: float | None) -> None:
    for name, count in {"trials": trials, "workers": workers}.items():
        if count is not None and count < 1:
            raise UsageError(f"{name} is {count}; at least 1")
    for name, seconds in {"timeout": timeout, "trial_timeout": trial_timeout}.items():
        if seconds is not None and not seconds > 0:
            raise UsageError(f"{name} is {seconds} seconds; it must be above 0")
