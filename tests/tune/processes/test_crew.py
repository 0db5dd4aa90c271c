import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from autoprec.errors import UsageError
from autoprec.tune.processes import crew as crews
from autoprec.tune.processes.crew import Crew

#: What the workers of these tests run: each leaves its id in the folder, and goes on until told to end.
WORK = """
import os, pathlib, signal, time

def work(folder, how="end"):
    folder = pathlib.Path(folder)
    (folder / f"started-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if how == "refuse":
        from autoprec.errors import StudyError
        raise StudyError("not like this")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while not (folder / "end").exists():
            time.sleep(0.02)
    except KeyboardInterrupt:
        (folder / f"interrupted-{os.getpid()}").touch()
        if how == "stubborn":
            time.sleep(60)
        raise
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "crewwork.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("crewwork", None)
    import crewwork

    yield crewwork.work
    sys.modules.pop("crewwork", None)


def _pids(folder, what="started", count=0):
    deadline = time.monotonic() + 60
    while len(found := list(folder.glob(f"{what}-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(found) >= count
    return {int(path.name.partition("-")[2]) for path in found}


def test_workers_run_and_end_by_themselves(tmp_path, work, monkeypatch):
    monkeypatch.setattr(crews, "_ENDING_S", 60.0)
    with Crew(work, {"folder": str(tmp_path)}, 2) as crew:
        assert _pids(tmp_path, count=2) == {process.pid for process in crew.processes}
        (tmp_path / "end").touch()
    assert crew.processes == []
    assert _pids(tmp_path, "interrupted") == set()


def test_a_worker_that_has_not_noticed_the_end_is_interrupted(tmp_path, work, monkeypatch):
    monkeypatch.setattr(crews, "_ENDING_S", 0.1)
    with Crew(work, {"folder": str(tmp_path)}, 1) as crew:
        started = _pids(tmp_path, count=1)
    assert crew.processes == []
    assert _pids(tmp_path, "interrupted") == started


def test_no_further_worker_is_started_for_one(tmp_path, work):
    with Crew(work, {"folder": str(tmp_path)}, 0) as crew:
        assert crew.processes == []


def test_a_dead_worker_is_replaced(tmp_path, work):
    said = []
    with Crew(work, {"folder": str(tmp_path)}, 1, on_event=said.append):
        (first,) = _pids(tmp_path, count=1)
        os.kill(first, signal.SIGKILL)
        assert len(_pids(tmp_path, count=2)) == 2
        (tmp_path / "end").touch()
    assert said == ["worker 1 ended by signal 9; another takes its place"]


def test_a_worker_that_always_dies_is_replaced_no_more_at_last(tmp_path, work, monkeypatch):
    monkeypatch.setattr(crews, "MAX_REPLACEMENTS", 1)
    said = []
    with Crew(work, {"folder": str(tmp_path), "how": "die"}, 1, on_event=said.append) as crew:
        crew._monitor.join(60)
    assert len(_pids(tmp_path)) == 2
    assert said[-1] == "worker 1 ended by signal 9 again; it isn't replaced any more"


def test_a_worker_that_says_why_is_not_replaced(tmp_path, work, capfd):
    with Crew(work, {"folder": str(tmp_path), "how": "refuse"}, 1) as crew:
        crew._monitor.join(60)
    assert len(_pids(tmp_path)) == 1
    assert capfd.readouterr().err == "worker 1: not like this\n"


def _fail_inside(crew, folder, error):
    with crew:
        _pids(folder, count=crew._count)
        raise error


def test_an_interruption_is_handed_on(tmp_path, work):
    crew = Crew(work, {"folder": str(tmp_path)}, 2)
    with pytest.raises(KeyboardInterrupt):
        _fail_inside(crew, tmp_path, KeyboardInterrupt)
    assert crew.processes == []
    assert _pids(tmp_path, "interrupted") == _pids(tmp_path, count=2)


def test_a_worker_that_does_not_end_is_ended(tmp_path, work, monkeypatch):
    monkeypatch.setattr(crews, "_GRACE_S", 0.3)
    crew = Crew(work, {"folder": str(tmp_path), "how": "stubborn"}, 1)
    with pytest.raises(KeyError):
        _fail_inside(crew, tmp_path, KeyError)
    assert crew.processes == []


def test_devices_are_shared_out(tmp_path, work, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with Crew(work, {"folder": str(tmp_path)}, 2, num_devices=2):
        _pids(tmp_path, count=2)
        (tmp_path / "end").touch()
    assert sorted(path.read_text() for path in tmp_path.glob("started-*")) == ["4", "7"]


def test_what_cannot_be_sent_is_refused(tmp_path, work):
    with pytest.raises(UsageError, match=r"4 workers are separate processes.*file\.py:name"):
        Crew(work, {"folder": lambda: None}, 3)


def test_workers_end_when_the_first_process_is_killed(tmp_path, work):
    program = textwrap.dedent("""
        import sys, time
        from crewwork import work
        from autoprec.tune.processes.crew import Crew
        if __name__ == "__main__":
            with Crew(work, {"folder": sys.argv[1]}, 1):
                time.sleep(60)
        """)
    (tmp_path / "first.py").write_text(program)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    command = [sys.executable, str(tmp_path / "first.py"), str(tmp_path)]
    with subprocess.Popen(command, env=environment) as first:
        (worker,) = _pids(tmp_path, count=1)
        first.kill()
    assert _pids(tmp_path, "interrupted", count=1) == {worker}
