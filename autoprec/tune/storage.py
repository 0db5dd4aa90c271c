"""The study in its storage: opened or resumed, recognised, and cleared of what dead processes left."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from autoprec.errors import StudyError

_FINGERPRINT = "autoprec:fingerprint"
LEASE = "lease"
#: A running trial without a lease is one whose process died between two writes.
_LEASE_GRACE_S = 60.0
#: A mix that takes its process down is given up after so many tries.
_MAX_ATTEMPTS = 3


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Our own progress says what Optuna would log."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def open_study(name: str, storage: str | BaseStorage | None, folder: Path, identity: Mapping[str, Any]) -> optuna.Study:
    """The study of that name, made if it isn't there.

    Args:
        name: of the study.
        storage: Optuna's URL or object; None is an SQLite file in ``folder``.
        folder: of the run.
        identity: what the study must have been made for.

    Raises:
        StudyError: the storage can't be used, or the study was made for something else.
    """
    if storage is None:
        folder.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{folder / 'study.db'}"
    try:
        with quiet_optuna():
            study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
    except Exception as exc:  # each database driver has its own errors
        raise StudyError(
            f"the storage {without_password(storage)} can't be used: {type(exc).__name__}: {exc}. Allowed: an Optuna "
            "storage URL such as sqlite:///study.db or postgresql://user@host/name"
        ) from exc
    _check_identity(study, identity)
    return study


def _check_identity(study: optuna.Study, identity: Mapping[str, Any]) -> None:
    known = study.user_attrs.get(_FINGERPRINT)
    if known is None:
        study.set_user_attr(_FINGERPRINT, dict(identity))
        return
    differing = [key for key in identity if known.get(key) != identity[key]]
    if differing:
        listed = "\n".join(
            f"  {key}: {_short(known.get(key))} there, {_short(identity[key])} here" for key in differing
        )
        raise StudyError(
            f"study {study.study_name!r} was made for something else:\n{listed}\n"
            "Its trials can't be compared with new ones; give this one another name (--study NAME, study=)"
        )


def without_password(storage: str | BaseStorage) -> str:
    """A storage's URL as it may be shown."""
    return re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", storage) if isinstance(storage, str) else repr(storage)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}…"


def take_lease(trial: Trial) -> None:
    """Say who runs the trial, so that others can see whether it still does."""
    trial.set_user_attr(
        LEASE, {"host": socket.gethostname(), "pid": os.getpid(), "started": _process_start(os.getpid())}
    )


def reclaim_stale_trials(study: optuna.Study) -> int:
    """Fail the running trials of processes on this host that are gone, and enqueue their mixes again.

    Returns:
        how many there were.
    """
    stale = [trial for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)) if _is_stale(trial)]
    for trial in stale:
        give_up(study, trial, "its process is gone")
    return len(stale)


def give_up(study: optuna.Study, trial: FrozenTrial, why: str) -> None:
    """End a trial that wasn't measured, and enqueue its mix again, unless that ended the same way before."""
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
    params = trial.params or trial.system_attrs.get("fixed_params")
    attempt = trial.user_attrs.get("attempt", 1)
    if params and attempt < _MAX_ATTEMPTS:
        attrs = {"name": trial.user_attrs.get("name", "search"), "attempt": attempt + 1, "again": why}
        study.enqueue_trial(dict(params), user_attrs=attrs)


def _is_stale(trial: FrozenTrial) -> bool:
    lease = trial.user_attrs.get(LEASE)
    if lease is None:
        return trial.datetime_start is None or time.time() - trial.datetime_start.timestamp() > _LEASE_GRACE_S
    if lease["host"] != socket.gethostname():
        return False
    started = _process_start(lease["pid"])
    return started is None or started != lease["started"]


def _process_start(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None if there is none.  Pids are used again."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # the command's name may hold spaces and brackets
            return stat.read_text().rpartition(")")[2].split()[19]
        except OSError:
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "unknown"
    return "unknown"
