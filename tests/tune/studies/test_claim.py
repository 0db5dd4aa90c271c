import threading
import time

import optuna
import pytest

from autoprec.tune.studies.claim import claim
from autoprec.tune.studies.lease import LEASE, own_lease, worker_name
from autoprec.tune.studies.storage import open_storage


@pytest.fixture
def storage(tmp_path):
    return open_storage(str(tmp_path / "s.log"), tmp_path)


def test_what_is_free_is_held(storage):
    for _ in range(2):
        with claim(storage, "s", "prepare") as holder:
            assert holder is None


def test_what_is_held_says_by_whom(storage):
    with claim(storage, "s", "confirm"), claim(storage, "s", "confirm", wait=False) as holder:
        assert holder == worker_name()


def test_words_and_studies_are_held_apart(storage):
    with (
        claim(storage, "s", "prepare"),
        claim(storage, "s", "confirm", wait=False) as other,
        claim(storage, "t", "prepare", wait=False) as another,
    ):
        assert (other, another) == (None, None)


def test_one_waits_for_another(storage):
    order, told = [], []

    def second():
        with claim(storage, "s", "prepare", on_wait=told.append, poll_s=0.01):
            order.append("second")

    with claim(storage, "s", "prepare"):
        thread = threading.Thread(target=second)
        thread.start()
        while not told:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert told == [worker_name()]


def test_a_dead_process_holds_nothing(storage):
    with claim(storage, "s", "prepare"):
        claims = optuna.load_study(storage=storage, study_name="s (claims)")
        storage.set_trial_user_attr(claims.trials[0]._trial_id, LEASE, {**own_lease(), "started": "12"})
        with claim(storage, "s", "prepare", wait=False) as holder:
            assert holder is None


def test_an_error_lets_go(storage):
    with pytest.raises(KeyError), claim(storage, "s", "prepare"):
        raise KeyError
    with claim(storage, "s", "prepare", wait=False) as holder:
        assert holder is None


def test_the_study_itself_stays_as_it_is(storage):
    study = optuna.create_study(storage=storage, study_name="s")
    with claim(storage, "s", "prepare"):
        assert study.trials == []
