"""A process that may die: started afresh, asked, waited for no longer than allowed, and ended with all it started.

Not ``multiprocessing``'s own ``Process``: its spawn imports the caller's main module again, so that a script without
an ``if __name__ == "__main__"`` would start its study in the worker too.  Pebble (LGPL) kills a task that is late, but
starts its processes by that spawn, and can't be told to drop one that leaks; loky's executor is broken as a whole by
one death and has no time limit a task.  What is needed here is one process, one pipe and three signals.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Literal

_POLL_S, _PARENT_POLL_S, _GRACE_S = 0.2, 0.5, 5.0
_CALL = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
#: Asks the process for its stack.
_LOOK = signal.SIGUSR1
_NUM_CALLS, _LOOK_S = 3, 1.0
_SIGNALS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGBUS: "a bus error: often shared memory that is full",
    signal.SIGABRT: "a library's own abort",
    signal.SIGFPE: "an arithmetic fault",
    signal.SIGILL: "an instruction that this processor lacks",
    signal.SIGKILL: "from outside, or by the kernel for want of memory",
}


@dataclass(frozen=True, slots=True)
class Death:
    """A process that is gone without an answer.

    Args:
        state: ``crashed`` by itself or from outside, or ended here at its ``timeout``.
        note: how, and where in the code if it is known.
    """

    state: Literal["crashed", "timeout"]
    note: str


class ChildProcess:
    """A new interpreter at the other end of a pipe.

    Args:
        boot: the code it runs.  Its arguments are those of :func:`prepare_child`, as numbers; the first message in the
            pipe is what this process may import.
        packed: the second message.
        is_waiting: given the innermost call of its stack, as ``name (file:line)``, says whether it only waits for
            another process; it gets its time anew then.
    """

    def __init__(self, boot: str, packed: bytes, is_waiting: Callable[[str], bool] = lambda call: False) -> None:
        self._is_waiting, self._num_seen = is_waiting, 0
        self._pipe, theirs = multiprocessing.Pipe()
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        shared = (theirs.fileno(), self._trace.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", boot, *map(str, shared), str(os.getpid())],
            pass_fds=shared,
            process_group=0,  # Ctrl-C comes to this process alone, which then ends all of that group
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe, self._trace)
        with contextlib.suppress(OSError):  # it is gone already: the first answer says so
            self._pipe.send(sys.path)
            self._pipe.send_bytes(packed)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: Any, limit_s: float | None) -> Any | Death:
        """Send a message and wait for the answer; a process that gives none in time is ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send(message)
        return self.answer(limit_s)

    def answer(self, limit_s: float | None) -> Any | Death:
        """Wait for an answer, at most so many seconds; None waits for ever."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while True:
                left_s = _POLL_S if deadline is None else min(_POLL_S, max(0.0, deadline - time.monotonic()))
                is_alive = self.is_alive()  # asked before the pipe: what a dead one has sent still counts
                if self._pipe.poll(left_s):
                    return self._pipe.recv()
                if not is_alive:  # its own children may hold the pipe open
                    return self._crashed()
                if limit_s is not None and deadline is not None and time.monotonic() >= deadline:
                    calls = self._look()
                    if not calls or not self._is_waiting(calls[0]):
                        self.end()
                        return Death("timeout", _with_place(f"no answer in {round(limit_s, 1):g} s", calls))
                    deadline = time.monotonic() + limit_s
        except (EOFError, ConnectionResetError):
            return self._crashed()
        except BaseException:
            self.end()
            raise

    def _look(self) -> list[str]:
        """The calls that the process is in now; empty if it doesn't say."""
        known = len(self._read_trace())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, _LOOK)
        end = time.monotonic() + _LOOK_S
        calls: list[str] = []
        while not calls and time.monotonic() < end:
            time.sleep(_LOOK_S / 20)
            calls = _calls(self._read_trace()[known:])
        return calls

    def _crashed(self) -> Death:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its end of the pipe closes a moment before it dies
            self._process.wait(_GRACE_S)
        _, _, trace = self._read_trace().partition("Fatal Python error")
        self.end()
        return Death("crashed", _with_place(_how(self._process.returncode), _calls(trace)))

    def _read_trace(self) -> str:
        # read without a seek: the position in the file is the other process's too
        return os.pread(self._trace.fileno(), os.fstat(self._trace.fileno()).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """End the process and whatever it started: asked first, then killed."""
        self._finalizer()


def prepare_child(pipe: Connection, trace: int, parent: int) -> None:
    """What the new process does first.

    Args:
        pipe: to the parent.
        trace: descriptor of a file for the stack at a crash.
        parent: process id; when that process is gone, this one ends, whatever it is doing.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what was printed before a crash is seen
    for descriptor in (pipe.fileno(), trace):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(trace, all_threads=False)
    faulthandler.register(_LOOK, trace, all_threads=False)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A parent that was killed closes the pipe, but nobody looks at it in the middle of a trial."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)  # this process leads a group: what it started ends too


def _end(process: subprocess.Popen[bytes], pipe: Connection, trace: IO[bytes]) -> None:
    pipe.close()
    _kill(process)
    trace.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal_group(process, signal.SIGKILL)  # what it had started, and itself if it didn't listen
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _how(code: int) -> str:
    if code >= 0:
        return f"its process exited with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"its process was killed by signal {-code}"
    why = _SIGNALS.get(number)
    return f"its process was killed by {number.name}{f' ({why})' if why else ''}"


def _with_place(note: str, calls: Sequence[str]) -> str:
    return f"{note}, in {' < '.join(calls[:_NUM_CALLS])}" if calls else note


def _calls(trace: str) -> list[str]:
    """The calls of a stack that ``faulthandler`` wrote, the innermost first."""
    return [f"{call['name']} ({Path(call['file']).name}:{call['line']})" for call in _CALL.finditer(trace)]
