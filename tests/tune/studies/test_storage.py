import subprocess
import sys

import optuna
import pytest
from optuna.storages import InMemoryStorage

from autoprec.errors import MissingExtraError, StudyError, UsageError
from autoprec.tune.studies import storage as storages
from autoprec.tune.studies.storage import (
    known_identity,
    open_storage,
    open_study,
    sole_process,
    storage_url,
    without_password,
)

IDENTITY = {"model": "abc", "data": "d"}


@pytest.fixture
def study(tmp_path):
    return open_study("s", None, tmp_path, IDENTITY)


def test_a_study_goes_on_in_its_folder(tmp_path, study):
    study.add_trial(optuna.create_trial(value=1.0))
    assert len(open_study("s", None, tmp_path, IDENTITY).trials) == 1
    assert (tmp_path / "study.db").is_file()


def test_a_study_of_something_else_is_refused(tmp_path, study):
    with pytest.raises(StudyError) as caught:
        open_study("s", None, tmp_path, {"model": "xyz", "data": "d"})
    assert "model: 'abc' there, 'xyz' here" in str(caught.value)
    assert "data" not in str(caught.value).partition("\n")[2].partition("\n")[0]


def test_what_a_study_was_made_for_is_known_before_it_is_opened(tmp_path, study):
    opened = open_storage(None, tmp_path)
    assert known_identity(opened, "s") == IDENTITY
    assert known_identity(opened, "another") is None


@pytest.mark.parametrize("storage", ["nonsense://x", "sqlite:////no/such/folder/x.db", "journal:///no/such/folder/x"])
def test_a_storage_that_cannot_be_used_is_refused(tmp_path, storage):
    with pytest.raises(StudyError, match="can't be used"):
        open_study("s", storage, tmp_path, IDENTITY)


def test_a_word_is_no_storage(tmp_path):
    with pytest.raises(UsageError, match=r"'mystudy' is neither a URL nor the path of a journal. Allowed: sqlite"):
        open_storage("mystudy", tmp_path)


def test_a_password_is_not_shown():
    assert without_password("postgresql://me:s3cret@host/db") == "postgresql://me:***@host/db"
    assert without_password("sqlite:///a.db") == "sqlite:///a.db"


@pytest.mark.parametrize("spelled", ["{}/my.log", "{}/my.journal", "journal://{}/my.log"])
def test_a_journal_is_a_url_or_a_path(tmp_path, spelled):
    study = open_study("s", spelled.format(tmp_path), tmp_path, IDENTITY)
    study.add_trial(optuna.create_trial(value=1.0))
    assert len(open_study("s", spelled.format(tmp_path), tmp_path, IDENTITY).trials) == 1
    assert any(file.suffix in (".log", ".journal") for file in tmp_path.iterdir())


def test_a_storage_of_optunas_is_taken_as_it_is(tmp_path):
    mine = InMemoryStorage()
    assert open_storage(mine, tmp_path) is mine


def test_several_workers_get_a_journal_unless_they_name_a_storage(tmp_path):
    assert storage_url(None, tmp_path, workers=1) == f"sqlite:///{tmp_path}/study.db"
    assert storage_url(None, tmp_path, workers=4) == f"journal://{tmp_path}/study.log"


def test_one_worker_goes_on_in_the_journal_that_several_began(tmp_path):
    open_storage(None, tmp_path, workers=4)
    assert storage_url(None, tmp_path, workers=1).startswith("journal://")


@pytest.mark.parametrize("storage", ["sqlite:///x.db", None])
def test_several_workers_on_sqlite_are_refused(tmp_path, study, storage):
    with pytest.raises(UsageError, match=r"4 workers can't share sqlite:.*SQLite takes one process.*journal:///"):
        open_storage(storage, tmp_path, workers=4)


def test_a_second_process_on_an_sqlite_file_is_refused(tmp_path, study):
    program = (
        "import sys, pathlib\n"
        "from autoprec.tune.studies.storage import open_study, sole_process\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with sole_process(open_study('s', None, folder, {})):\n"
        "    print('in', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(StudyError, match="another process runs trials"), sole_process(study):
            pass
        other.kill()
    with sole_process(study):
        pass


@pytest.mark.parametrize(
    ("there", "url"),
    [
        ({"psycopg", "psycopg2"}, "postgresql+psycopg://me@host/db"),
        ({"psycopg2"}, "postgresql+psycopg2://me@host/db"),
    ],
)
def test_the_driver_that_is_there_is_used(monkeypatch, there, url):
    monkeypatch.setattr(storages.importlib.util, "find_spec", lambda name: name if name in there else None)
    assert storages._with_driver("postgresql", "me@host/db") == url
    assert storages._with_driver("postgres", "me@host/db") == url


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("postgresql://me:secret@host/db", r"pip install 'autoprec\[postgres\]'"),
        ("mysql://me:secret@host/db", "pip install pymysql"),
    ],
)
def test_a_missing_driver_is_named(monkeypatch, tmp_path, url, remedy):
    monkeypatch.setattr(storages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=remedy) as caught:
        open_storage(url, tmp_path)
    assert "secret" not in str(caught.value)


def test_a_driver_named_in_the_url_may_be_missing(tmp_path):
    with pytest.raises(MissingExtraError, match="needs a driver that isn't installed"):
        open_storage("mysql+mysqlconnector://me@host/db", tmp_path)
