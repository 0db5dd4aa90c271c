import os
import signal
import sys
import time
from pathlib import Path

import pytest

from autoprec.tune.processes import process
from autoprec.tune.processes.process import ChildProcess, Death

#: Prepared as a worker is, without its imports: it starts in no time.  It runs the code it is given, and answers with
#: what each message evaluates to.
BOOT = f"""
import ctypes, importlib.util, os, signal, sys, time
from multiprocessing.connection import Connection
spec = importlib.util.spec_from_file_location("process", {process.__file__!r})
process = importlib.util.module_from_spec(spec)
sys.modules["process"] = process
spec.loader.exec_module(process)
pipe = Connection(int(sys.argv[1]))
path = pipe.recv()
process.prepare_child(pipe, int(sys.argv[2]), int(sys.argv[3]))
exec(pipe.recv_bytes())
while True:
    pipe.send(eval(pipe.recv()))
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.fixture
def start():
    started: list[ChildProcess] = []

    def make(code: str = "") -> ChildProcess:
        started.append(ChildProcess(BOOT, code.encode()))
        return started[-1]

    yield make
    for child in started:
        child.end()


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie has ended; whoever adopted it is slow to look


def _await_end(pid: int) -> bool:
    end = time.monotonic() + 30
    while _is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not _is_running(pid)


def test_it_answers_as_often_as_it_is_asked(start):
    child = start("x = 20")
    assert [child.ask("x + 1", 60), child.ask("x + 2", None)] == [21, 22]
    assert child.ask("path", 60) == sys.path
    assert child.ask("sys.stdin.read()", 60) == ""
    assert child.is_alive()


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL (from outside, or by the kernel for want of memory)",
        ),
        ("os._exit(3)", "exited with code 3"),
        ("os._exit(0)", "exited with code 0"),
        ("sys.exit(4)", "exited with code 4"),
        ("os.abort()", "killed by SIGABRT (a library's own abort), in <module> (<string>:1) < <module> (<string>:13)"),
        ("ctypes.string_at(0)", "killed by SIGSEGV (a segmentation fault), in string_at (__init__.py:"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS (a bus error: often shared memory that is full)"),
        ("os.kill(os.getpid(), 40)", "killed by signal 40"),
    ],
)
def test_every_way_to_die_has_its_words(start, code, note):
    child = start()
    death = child.ask(code, 60)
    assert isinstance(death, Death)
    assert death.state == "crashed"
    assert death.note.startswith(f"its process was {note}" if note.startswith("killed") else f"its process {note}")
    assert not child.is_alive()


@pytest.mark.parametrize("before", ["", DEAF])
def test_a_process_that_does_not_answer_is_ended_and_says_where_it_was(start, monkeypatch, before):
    monkeypatch.setattr(process, "_GRACE_S", 1.0)
    child = start(before)
    assert child.ask("1", 60) == 1
    death = child.ask("[None for _ in iter(int, 1)]", 0.5)
    assert death.state == "timeout"
    assert death.note.startswith("no answer in 0.5 s, in <listcomp> (<string>:1) < ")
    assert _await_end(child.pid)


def test_waiting_for_another_process_is_no_hang():
    code = b"def hold(): time.sleep(1.5); return 7"
    child = ChildProcess(BOOT, code, lambda call: call.startswith("hold ("))
    try:
        assert child.ask("1", 60) == 1
        assert child.ask("hold()", 0.5) == 7
        assert child.ask("hold() + [time.sleep(9)]", 1.0).state == "timeout"
        assert not child.is_alive()
    finally:
        child.end()


def test_a_crash_after_a_wait_says_where_it_crashed():
    child = ChildProcess(BOOT, b"def hold(): time.sleep(1)", lambda call: call.startswith("hold ("))
    try:
        assert child.ask("1", 60) == 1
        assert child.ask("hold() or os.abort()", 0.5).note.endswith(
            ", in <module> (<string>:1) < <module> (<string>:13)"
        )
    finally:
        child.end()


@pytest.mark.parametrize("how", ["os._exit(1)", "time.sleep(1000)"])
def test_nothing_that_it_started_outlives_it(start, how):
    child = start("mine = os.fork()\nif not mine:\n    time.sleep(1000)")
    grandchild = child.ask("mine", 60)
    assert _is_running(grandchild)
    assert isinstance(child.ask(how, 1.0), Death)  # though the grandchild holds the pipe open
    assert _await_end(grandchild)


def test_an_interruption_ends_it(start):
    child = start()
    assert child.ask("1", 60) == 1

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.ask("time.sleep(1000)", None)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _await_end(child.pid)


def test_a_process_that_was_dead_before_it_was_asked(start):
    child = start()
    assert child.ask("1", 60) == 1
    os.kill(child.pid, signal.SIGKILL)
    assert _await_end(child.pid)
    assert not child.is_alive()
    assert child.ask("1", 60) == Death("crashed", f"its process was killed by SIGKILL ({process._SIGNALS[9]})")


def test_what_nobody_holds_any_more_ends(start):
    child = ChildProcess(BOOT, b"")
    pid = child.pid
    assert child.ask("1", 60) == 1
    del child
    assert _await_end(pid)
