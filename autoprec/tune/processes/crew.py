"""``--workers N``: further processes of a study on this host, started, replaced and ended by its first one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from autoprec.errors import AutoprecError, UsageError
from autoprec.tune.studies.lock import HAS_LOCKS

#: A worker that dies more often isn't replaced any more.
MAX_REPLACEMENTS = 5
#: A worker ends in this time when the study is over; an interrupted one gives its trial back in this time.
_ENDING_S, _GRACE_S = 3.0, 15.0
_POLL_S = 0.5
#: Ends of a process that aren't deaths: an error in words, and an interruption.
_REFUSED, _INTERRUPTED = 2, 130

OnEvent = Callable[[str], None]


@dataclass
class _Worker:
    """The place of one worker and the process that fills it."""

    index: int
    process: BaseProcess
    num_replaced: int = 0
    is_over: bool = False


class Crew:
    """Processes that all run ``work(**arguments)``: a context that starts them, replaces dead ones, and ends them.

    The block is left when no trial runs any more.  The processes have a group of their own, so that an interruption at
    the terminal reaches the first process only, which hands it on once.  They end, too, when the first one is killed.

    Args:
        work: a module's function; it returns when the study has its trials.
        arguments: its arguments.
        count: processes.
        num_devices: GPUs to be shared out in turn, the first one being the first process's; 0 where there are none.
        on_event: told in words of a worker that died, from another thread.

    Raises:
        UsageError: the arguments can't be sent to another process, or this system has no locks for devices.
    """

    def __init__(
        self,
        work: Callable[..., object],
        arguments: Mapping[str, Any],
        count: int,
        *,
        num_devices: int = 0,
        on_event: OnEvent = lambda message: None,
    ) -> None:
        if count and not HAS_LOCKS:
            raise UsageError("several workers time a device in turn by file locks, which this system lacks: take 1")
        try:
            pickle.dumps((work, dict(arguments)))
        except Exception as exc:  # whatever an object's own pickling raises
            raise UsageError(
                f"{count + 1} workers are separate processes, and the task can't be sent to them: {exc}. Name it as "
                "file.py:name or pkg.mod:name, or take one worker"
            ) from exc
        self._context = multiprocessing.get_context("spawn")
        self._target = (work, dict(arguments), num_devices)
        self._count, self._on_event = count, on_event
        self._workers: list[_Worker] = []
        self._is_closing = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="autoprec-crew", daemon=True)

    def __enter__(self) -> Crew:
        self._workers = [_Worker(index, self._start(index)) for index in range(1, self._count + 1)]
        if self._workers:
            self._monitor.start()
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self._is_closing.set()
        if self._workers:
            self._monitor.join()
        try:
            if exc_type is None:
                # the study is over; one that has just begun hasn't noticed yet
                self._join(_ENDING_S)
        finally:
            self._interrupt()

    @property
    def processes(self) -> list[BaseProcess]:
        """Those that run."""
        return [worker.process for worker in self._workers if worker.process.is_alive()]

    def _start(self, index: int) -> BaseProcess:
        process = self._context.Process(target=_main, args=(*self._target, index), name=f"autoprec-worker-{index}")
        process.start()
        return process

    def _watch(self) -> None:
        while not self._is_closing.is_set():
            open_workers = [worker for worker in self._workers if not worker.is_over]
            if not open_workers:
                return
            wait([worker.process.sentinel for worker in open_workers], timeout=_POLL_S)
            for worker in open_workers:
                if not worker.process.is_alive() and not self._is_closing.is_set():
                    self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        code = worker.process.exitcode
        if code in (0, _REFUSED, _INTERRUPTED):
            worker.is_over = True
            return
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        if worker.num_replaced >= MAX_REPLACEMENTS:
            worker.is_over = True
            self._on_event(f"worker {worker.index} ended {how} again; it isn't replaced any more")
            return
        self._on_event(f"worker {worker.index} ended {how}; another takes its place")
        worker.num_replaced += 1
        worker.process = self._start(worker.index)

    def _interrupt(self) -> None:
        """Ask each to give its trial back, and end those that don't."""
        for process in self.processes:
            _signal(process, signal.SIGINT)
        self._join(_GRACE_S)
        for process in self.processes:
            process.kill()
            process.join()

    def _join(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))


def _signal(process: BaseProcess, number: int) -> None:
    try:
        if process.pid is not None:
            os.kill(process.pid, number)
    except ProcessLookupError:
        pass


def _main(work: Callable[..., object], arguments: dict[str, Any], num_devices: int, index: int) -> None:
    """What a worker process runs."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    # a process that was started in the background ignores interruptions
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, name="autoprec-parent", daemon=True).start()
    if num_devices > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_devices)))
        devices = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[index % len(devices)]
    try:
        work(**arguments)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except AutoprecError as exc:
        print(f"worker {index}: {exc}", file=sys.stderr)
        sys.exit(_REFUSED)


def _end_with_parent() -> None:
    """A worker whose first process was killed would go on unseen."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_S)
    os._exit(1)
