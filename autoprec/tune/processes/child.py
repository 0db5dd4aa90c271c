"""The worker process: makes a bench, and runs the calls that come through a pipe until the pipe closes."""

from __future__ import annotations

import functools
import io
import os
import pickle
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from autoprec.errors import AutoprecError, StudyError, TaskError
from autoprec.tasks import Task, load_task
from autoprec.tune.processes.leaks import MemoryWatch, apply_settings, changed_settings, is_broken, read_settings
from autoprec.tune.processes.process import prepare_child
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.outcome import Effort, Outcome

#: Methods of a bench that run the task as it is: what they raise is the task's fault.
FP32_CALLS = ("reference", "measure_step_s", "noise")

#: What a new interpreter runs: the pipe's and the trace file's descriptors and the parent's process id are its
#: arguments; what it may import comes first.
BOOT = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from autoprec.tune.processes.child import serve
serve(pipe, trace=int(sys.argv[2]), parent=int(sys.argv[3]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One method of the bench to run.

    Args:
        method: its name.
        args: positional.
        effort: of the bench from now on.
    """

    method: str
    args: tuple[Any, ...]
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a call, or of the start.

    Args:
        value: what the method returned.
        error: what it raised, as one of autoprec's own errors.
        trace: its traceback.
        leaks: in words, what was left behind, so that this process had better end.
        references: fp32 losses known by now, for the next process.
    """

    value: Any = None
    error: AutoprecError | None = None
    trace: str = ""
    leaks: tuple[str, ...] = ()
    references: dict[Any, Any] = field(default_factory=dict)


def pack(bench: Bench, spec: str | None) -> bytes:
    """A bench and this process's settings of torch, as bytes.

    Args:
        bench: its fields with an underscore are caches, which stay here, but for the reference losses.
        spec: the task's name, by which it is loaded again; None packs the task itself.

    Raises:
        Exception: what can't be pickled raises whatever it likes.
    """
    fields = {name: value for name, value in vars(bench).items() if not name.startswith("_")}
    buffer = io.BytesIO()
    _Packer(buffer, bench.task, spec).dump((read_settings(), type(bench), fields, bench._references))
    return buffer.getvalue()


def _unpack(packed: bytes) -> Bench:
    settings, make, fields, references = _Unpacker(io.BytesIO(packed)).load()
    bench = make(**fields)
    bench._references.update(references)
    apply_settings(settings)  # last: importing a task may have changed them
    return bench


class _Packer(cloudpickle.Pickler):
    """Writes a task's name instead of the task, wherever it is referred to."""

    def __init__(self, file: io.BytesIO, task: Task, spec: str | None) -> None:
        super().__init__(file)
        self._task, self._spec = task, spec

    def persistent_id(self, obj: Any) -> str | None:
        return self._spec if obj is self._task else None


class _Unpacker(pickle.Unpickler):
    """Loads the one task that was named."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._load_task = functools.cache(load_task)

    def persistent_load(self, pid: Any) -> Task:
        return self._load_task(pid)


def serve(pipe: Connection, *, trace: int, parent: int) -> None:
    """Run calls until the pipe closes.

    Args:
        pipe: gives a packed bench, then calls; takes a reply to each.
        trace: descriptor of the file for the stack at a crash.
        parent: process id; when that process is gone, this one ends, whatever it is doing.
    """
    prepare_child(pipe, trace, parent)
    try:
        bench = _unpack(pipe.recv_bytes())
    except Exception as exc:
        pipe.send(Reply(error=_as_ours(exc, "starting"), trace=traceback.format_exc()))
        return
    settings, memory = read_settings(), MemoryWatch(bench.device)
    pipe.send(Reply(value=time.monotonic()))  # the parent may look for it much later
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            reply = _run(bench, call, settings, memory)
        except SystemExit as exc:  # what else lives in this process could hold up an ordinary end
            os._exit(exc.code if isinstance(exc.code, int) else 1)
        pipe.send(reply)


def _run(bench: Bench, call: Call, settings: dict[str, Any], memory: MemoryWatch) -> Reply:
    bench.effort = call.effort
    known = set(bench._references)
    value, error, trace = None, None, ""
    try:
        value = getattr(bench, call.method)(*call.args)
    except Exception as exc:
        error, trace = _as_ours(exc, call.method), traceback.format_exc()
    leaks = [f"it left {name} changed" for name in changed_settings(settings)]
    if error is not None or (isinstance(value, Outcome) and value.state == "failed"):
        leaks.append(is_broken(bench.device))
    if call.method == "trial":
        leaks.append(memory.grown())
    learned = {key: losses for key, losses in bench._references.items() if key not in known}
    return Reply(value=value, error=error, trace=trace, leaks=tuple(filter(None, leaks)), references=learned)


def _as_ours(exc: Exception, doing: str) -> AutoprecError:
    """An exception as one that the parent can make again."""
    if isinstance(exc, AutoprecError):
        try:
            return pickle.loads(pickle.dumps(exc))
        except Exception:  # made with other arguments than its message
            return StudyError(f"{type(exc).__name__}: {exc}")
    kind = TaskError if doing in FP32_CALLS else StudyError
    return kind(f"{doing} raised {type(exc).__name__}: {exc}")
