import subprocess
import sys
import tempfile
import threading
import time

import pytest

from autoprec.errors import UsageError
from autoprec.tune.studies.lock import HAS_LOCKS, device_lock, drop, hold, in_turn, lock_path

pytestmark = pytest.mark.skipif(not HAS_LOCKS, reason="no file locks here")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock_path.cache_clear()
    yield
    lock_path.cache_clear()


class _Other:
    """Another worker, on a thread of its own: a lock belongs to whoever opened its file."""

    def __init__(self, *, shared, device="cpu"):
        self.has, self.end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(device, shared))

    def _run(self, device, shared):
        with device_lock(device, shared=shared):
            self.has.set()
            self.end.wait(20)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self._thread.join()


def test_steps_of_several_workers_overlap():
    with _Other(shared=True) as one, _Other(shared=True) as two:
        assert one.has.wait(20)
        assert two.has.wait(20)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_a_timing_is_alone(first, second):
    with _Other(shared=first) as one:
        one.has.wait(20)
        with _Other(shared=second) as two:
            assert not two.has.wait(0.2)
            one.end.set()
            assert two.has.wait(20)


def test_devices_have_locks_of_their_own():
    with _Other(shared=False) as one, _Other(shared=False, device="mps") as two:
        assert one.has.wait(20)
        assert two.has.wait(20)


def test_a_timing_that_waits_keeps_new_steps_out():
    with _Other(shared=True) as step:
        step.has.wait(20)
        with _Other(shared=False) as timing:
            time.sleep(0.2)
            with _Other(shared=True) as late:
                assert not late.has.wait(0.2)
                step.end.set()
                assert timing.has.wait(20)
                assert not late.has.is_set()
                timing.end.set()
                assert late.has.wait(20)


def test_steps_inside_a_timing_and_timings_inside_one_take_nothing():
    with device_lock("cpu"), device_lock("cpu", shared=True), device_lock("cpu"):
        pass
    with _Other(shared=False) as free:
        assert free.has.wait(20)


def test_a_timing_inside_a_step_is_refused():
    with (
        device_lock("cpu", shared=True),
        pytest.raises(UsageError, match="inside a training step"),
        device_lock("cpu"),
    ):
        pass


def test_a_killed_process_holds_nothing(tmp_path):
    program = (
        "import sys, pathlib, time\n"
        "from autoprec.tune.studies.lock import hold\n"
        "held = hold(pathlib.Path(sys.argv[1]))\n"
        "print('in', flush=True)\n"
        "time.sleep(60)\n"
    )
    file = tmp_path / "x.lock"
    with subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(BlockingIOError):
            hold(file, wait=False)
        other.kill()
    drop(hold(file, wait=False))


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "x.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"x\.lock"):
        hold(tmp_path / "x.lock")


def test_the_folder_is_everybodys():
    with device_lock("cpu"):
        assert lock_path("cpu").parent.stat().st_mode & 0o7777 == 0o1777


def test_a_courtesy_ends():
    entered = threading.Event()

    def enter():
        with in_turn("study", 0.1):
            entered.set()

    with in_turn("study", 20):
        thread = threading.Thread(target=enter)
        thread.start()
        assert entered.wait(20)
        thread.join()


def test_a_turn_is_waited_for():
    entered = threading.Event()

    def enter():
        with in_turn("study", 20):
            entered.set()

    with in_turn("study", 20):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(20)
    thread.join()
