"""``autoprec report`` on a result as the tuner writes it."""

import json
from pathlib import Path

import pytest

RESULT = {
    "schema_version": 1, "study": "s", "task": "gpt", "verdict": "Stay in fp32: no mix could be timed.",
    "outcome": "no_gain", "budget": 0.005, "winner": None, "plan": {}, "evidence": {}, "groups": [],
    "reference": [3.0, None], "warm_up": [], "noise": {"loss_gap": 0.0001}, "confirmations": [],
    "environment": {"device": "a CPU"}, "settings": {"task": "gpt", "trials": 1, "seed": 0},
    "trials": [{
        "number": 0, "name": "fp32", "plan_sha256": "x", "formats": {"a": "fp32"}, "scaler": {}, "low_share": 0.0,
        "state": "complete", "loss_gap": 0.0, "speedup": None, "losses": [], "num_skipped": 0, "seconds": 1.0,
        "note": "",
    }],
}  # fmt: skip


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/s")
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(RESULT))
    return folder


def test_the_page_is_written_beside_the_result_and_the_numbers_are_shown(study, cli):
    done = cli("report", "s")
    assert done.exit_code == 0, done.stderr
    page = (study / "report.html").read_text()
    for text in (RESULT["verdict"], "no explanations"):
        assert text in page
    assert RESULT["verdict"] in done.stdout
    assert "autoprec tune gpt --trials 1 --max-loss-increase 0.5% --seed 0 --study s" in done.stdout
    assert str(study / "report.html") in done.stdout


def test_the_page_goes_where_it_is_asked_for(study, cli):
    assert cli("report", study, "-o", "page.html").exit_code == 0
    assert "</html>" in Path("page.html").read_text()
    assert not (study / "report.html").exists()
    assert "nowhere" in cli("report", study, "-o", "nowhere/page.html").stderr


def test_the_numbers_as_json(study, cli):
    document = json.loads(cli("report", "s", "--json").stdout)
    assert (document["kind"], document["study"], len(document["trials"])) == ("measured", "s", 1)
    assert document["curves"][0]["losses"] == [3.0, None]


@pytest.mark.parametrize(("name", "said"), [("t", "finished in runs/: s"), ("runs", "goes on with it")])
def test_a_study_that_is_not_there(study, cli, name, said):
    done = cli("report", name)
    assert done.exit_code == 2
    assert said in done.stderr
