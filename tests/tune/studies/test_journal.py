import contextlib
import resource
import subprocess
import sys

import optuna
import pytest

from autoprec.errors import StudyError
from autoprec.tune.studies import journal
from autoprec.tune.studies.journal import open_journal
from autoprec.tune.studies.storage import open_study


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.log"


def _study(path):
    return open_study("s", str(path), path.parent, {"a": 1})


@contextlib.contextmanager
def _no_more_room(path, more):
    """No file may grow beyond this one's size and ``more`` bytes, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_a_line_of_a_killed_process_is_cut_off(path):
    study = _study(path)
    study.add_trial(optuna.create_trial(value=1.0))
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","study')
    assert len(_study(path).trials) == 1
    _study(path).add_trial(optuna.create_trial(value=2.0))
    assert [trial.value for trial in study.trials] == [1.0, 2.0]
    assert [trial.value for trial in _study(path).trials] == [1.0, 2.0]


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_stops_in_words_and_the_study_goes_on_later(path, room):
    study = _study(path)
    trial = study.ask()
    with _no_more_room(path, room), pytest.raises(StudyError, match=r"make room.*What is finished is kept"):
        study.tell(trial, 1.0)
    assert path.read_bytes().endswith(b"\n")
    study.tell(trial, 1.0)
    assert [trial.value for trial in _study(path).trials] == [1.0]


def test_writers_in_several_processes_lose_nothing(path):
    program = (
        "import sys, pathlib, optuna\n"
        "from autoprec.tune.studies.journal import open_journal\n"
        "optuna.logging.set_verbosity(optuna.logging.ERROR)\n"
        "study = optuna.create_study(storage=open_journal(pathlib.Path(sys.argv[1])), study_name='s',"
        " load_if_exists=True)\n"
        "for k in range(20):\n"
        "    study.add_trial(optuna.create_trial(value=float(k)))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    trials = optuna.load_study(storage=open_journal(path), study_name="s").trials
    assert [trial.number for trial in trials] == list(range(40))
    assert sorted(trial.value for trial in trials) == sorted(2 * [float(k) for k in range(20)])


def test_a_file_that_is_no_journal_is_left_alone(path):
    path.write_text("my notes, without a line end")
    with pytest.raises(StudyError, match="isn't a journal"):
        _study(path)
    assert path.read_text() == "my notes, without a line end"


def test_a_damaged_journal_is_said_to_be_one(path):
    _study(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"op_code": nonsense\n' + b"".join(lines[1:]))
    with pytest.raises(StudyError, match="can't be used"):
        _study(path)


@pytest.mark.parametrize(
    ("mounts", "is_network"),
    [
        ("/dev/a / ext4 rw 0 0\nhost:/x /data nfs4 rw 0 0\n", False),
        ("/dev/a / ext4 rw 0 0\nhost:/x {parent} nfs4 rw 0 0\n", True),
        ("host:/x / lustre rw 0 0\n/dev/a {parent} ext4 rw 0 0\n", False),
        ("fuse / fuse.sshfs rw 0 0\n", False),
    ],
)
def test_a_network_file_system_is_recognised(path, tmp_path, monkeypatch, mounts, is_network):
    table = tmp_path / "mounts"
    table.write_text(mounts.format(parent=tmp_path.parent))
    monkeypatch.setattr(journal, "_MOUNTS", table)
    assert journal._is_network(path) is is_network


def test_on_a_network_file_system_optunas_lock_is_used(path, monkeypatch):
    monkeypatch.setattr(journal, "_is_network", lambda path: True)
    study = _study(path)
    study.add_trial(optuna.create_trial(value=1.0))
    assert len(study.trials) == 1
    assert not path.with_name("s.log.flock").exists()
