import json

import pytest

from autoprec.errors import StudyError, UsageError
from autoprec.report import load
from autoprec.report.load import load_result


@pytest.fixture
def study(result, tmp_path, monkeypatch):
    """A finished study's folder, ``runs/s``."""
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("name", ["s", "runs/s", "runs/s/result.json"])
def test_a_study_is_found_by_name_folder_and_file(study, name):
    loaded = load_result(name)
    assert loaded.path.resolve() == study / "result.json"
    assert loaded.data.study == "s"
    assert loaded.data.sites == ()


def test_its_receipt_is_beside_it(study):
    row = {"site": "head", "asked": "bf16", "got": "bf16", "why": "", "mechanism": "frame", "op": "linear", "flops": 1}
    (study / "receipt.json").write_text(json.dumps({"rows": [row]}))
    assert load_result("s").data.sites[0].site == "head"


def test_what_was_settled_on_the_target_since_is_said(study):
    from autoprec.report.html import render

    settled = {"verdict": "the plan trains 1.8 times as fast", "environment": {"device": "an H100"}}
    (study / "settled.json").write_text(json.dumps(settled))
    data = load_result("s").data
    assert data.settled == "Measured on an H100 since: the plan trains 1.8 times as fast"
    assert data.settled in render(data)


def test_it_reads_what_the_tuner_writes():
    from autoprec.tune.answers.result import SCHEMA_VERSION

    assert load.SCHEMA_VERSION == SCHEMA_VERSION


def test_an_unknown_study_names_those_there_are(study):
    with pytest.raises(UsageError, match=r"'other'.*no study under runs/.*finished in runs/: s"):
        load_result("other")


def test_a_study_that_has_not_ended_says_how_it_goes_on(study):
    (study / "result.json").rename(study / "study.db")
    with pytest.raises(StudyError, match="at its end: the same 'autoprec tune' goes on"):
        load_result("s")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read"),
        ("[]", "holds a list"),
        ('{"schema_version": 2}', "newer autoprec wrote it; upgrade"),
        ('{"rows": []}', "schema_version None.*no result of autoprec tune"),
        ('{"schema_version": 1, "study": "s"}', "damaged.*noise"),
    ],
)
def test_a_result_that_is_none_is_refused_with_what_to_do(study, text, said):
    (study / "result.json").write_text(text)
    with pytest.raises(StudyError, match=said):
        load_result("s")


def test_a_trial_that_lacks_a_field_is_damage(study, result):
    (study / "result.json").write_text(json.dumps({**result, "trials": [{"number": 0}]}))
    with pytest.raises(StudyError, match="damaged"):
        load_result("s")
