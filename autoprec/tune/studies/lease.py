"""Who runs a trial, and whether it still does.

A running trial carries its process's *lease*.  On the same host a dead process is seen at once, by its id and start
time.  For other hosts the lease has a *beat* that its process counts up: one that stands still for long is a dead
process's.  The watcher's own clock says how long, so that hosts may disagree about the time.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

LEASE = "lease"
BEAT_S = 20.0
#: A beat that stands still for so long is a dead process's.
STALE_S = 120.0
#: A running trial that has no lease for so long is one whose process died between two writes.
_NO_LEASE_S = 60.0
_UNKNOWN = "unknown"

_log = optuna.logging.get_logger("autoprec")


def own_lease(beat: int = 0, heart: str = "") -> dict[str, Any]:
    """This process's; ``heart`` names what renews it."""
    return {
        "host": socket.gethostname(),
        "place": _place(),
        "pid": os.getpid(),
        "started": _process_start(os.getpid()),
        "heart": heart,
        "beat": beat,
    }


def worker_name(lease: dict[str, Any] | None = None) -> str:
    """A process as reports call it; this one without an argument."""
    lease = lease or own_lease()
    return f"{lease['host']}:{lease['pid']}"


class Watch:
    """Tells stale trials; remembers the beats it saw, so it is kept as long as its process watches."""

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._seen: dict[int, tuple[Any, float]] = {}

    def is_stale(self, trial: FrozenTrial) -> bool:
        """Whether nobody runs this running trial any more."""
        lease = trial.user_attrs.get(LEASE)
        if lease is not None and lease.get("place") == _place():
            started = _process_start(lease["pid"])
            return started is None or (started != lease["started"] and _UNKNOWN not in (started, lease["started"]))
        beat = None if lease is None else lease.get("beat")
        before, since = self._seen.setdefault(trial._trial_id, (beat, time.monotonic()))
        if before != beat:
            self._seen[trial._trial_id] = (beat, time.monotonic())
            return False
        return time.monotonic() - since > (min(_NO_LEASE_S, self._stale_s) if lease is None else self._stale_s)


class Heart:
    """Renews the leases of the trials that this process runs, in a thread."""

    def __init__(self, storage: BaseStorage, beat_s: float = BEAT_S) -> None:
        self._storage, self._beat_s = storage, beat_s
        self._name = secrets.token_hex(4)
        self._beats: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoprec-leases", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # it may be waiting for a database that is away
        self._stop.set()
        self._thread.join(timeout=1)

    def lease(self, beat: int = 0) -> dict[str, Any]:
        """For a trial that this process makes, and then holds."""
        return own_lease(beat, self._name)

    def hold(self, trial_id: int, *, has_lease: bool = False) -> None:
        """Renew the lease of a trial until :meth:`drop`; take it first, unless the trial was made with it."""
        if not has_lease:
            self._storage.set_trial_user_attr(trial_id, LEASE, self.lease())
        with self._lock:
            self._beats[trial_id] = 0

    def disowns(self, trial: FrozenTrial) -> bool:
        """Whether a trial has a lease from here and isn't held: made twice, or its end got lost with the storage."""
        with self._lock:
            is_held = trial._trial_id in self._beats
        return not is_held and trial.user_attrs.get(LEASE, {}).get("heart") == self._name

    def drop(self, trial_id: int) -> None:
        with self._lock:
            self._beats.pop(trial_id, None)

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            with self._lock:
                held = list(self._beats)
            for trial_id in held:
                self._beat(trial_id)

    def _beat(self, trial_id: int) -> None:
        with self._lock:
            if trial_id not in self._beats:
                return
            self._beats[trial_id] += 1
            beat = self._beats[trial_id]
        try:
            self._storage.set_trial_user_attr(trial_id, LEASE, self.lease(beat))
        except UpdateFinishedTrialError:
            self.drop(trial_id)
        except Exception as exc:  # the storage is away: whoever runs the trial says so
            _log.debug("the lease of trial %d wasn't renewed: %s", trial_id, exc)


@cache
def _place() -> str:
    """Where process ids mean the same: one boot of one host, one namespace of process ids."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:  # not Linux
        pass
    if os.name == "nt":
        parts.append(str(os.getpid()))  # nothing in the standard library asks after a process there: the beat tells
    return " ".join(parts)


def _process_start(pid: int) -> str | None:
    """When the process started, in clock ticks since boot; None if there is none.  Pids are used again."""
    try:
        # the command's name may hold spaces and brackets
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # a zombie is dead, though nobody has taken note
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if os.name == "nt":
        return _UNKNOWN
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return _UNKNOWN
