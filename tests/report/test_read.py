import json
from dataclasses import asdict

import pytest

from autoprec.report import render_report
from autoprec.report.command import command_line
from autoprec.report.mix import describe_mix
from autoprec.report.read import read_result


def test_a_study_as_the_tuner_writes_it_is_read(result):
    data = read_result(json.loads(json.dumps(result)))
    assert [row.role for row in data.trials] == ["reference", "baseline", "winner", *["candidate"] * 3]
    assert data.budget_pct == pytest.approx(0.5)
    assert data.trials[2].loss_gap_pct.value == pytest.approx(0.1)
    assert data.trials[2].mix == "bf16; b: fp32"
    facts = dict(data.facts)
    assert [item.figure for item in data.headlines] == ["bf16; b: fp32", "1.49×", "+0.120%"]
    assert data.is_measured
    assert data.kind == "measured on this device"
    assert facts["trials"] == "6 (4 complete, 1 stopped, 1 diverged)"


def test_a_trial_without_a_loss_shows_none_and_its_reason(result):
    diverged = read_result(result).trials[4]
    assert diverged.loss_gap_pct is None
    assert diverged.speedup is None
    assert diverged.note == "the loss is not finite"


def test_the_front_has_the_trials_that_none_beats(result):
    assert [row.number for row in read_result(result).trials if row.is_on_front] == [0, 2]


def test_the_curves_are_the_references_the_baselines_and_the_winners(result):
    curves = read_result(result).curves
    assert [curve.label for curve in curves] == ["fp32", "bf16", "bf16; b: fp32 (chosen)"]


def test_confirmations_name_their_mix_and_say_why(result):
    refused, accepted = read_result(result).confirmations
    assert (refused.mix, refused.is_accepted, refused.why) == ("fp32; a: bf16", False, "the loss diverged")
    assert accepted.loss_gap_pct.value == pytest.approx(0.12)


def test_the_receipts_rows_are_the_sites(result):
    row = {"site": "head", "op": "linear", "asked": "bf16", "got": "fp32", "why": "w", "mechanism": "frame", "flops": 3}
    (site,) = read_result(result, {"rows": [row]}).sites
    assert asdict(site) == {"site": "head", "asked": "bf16", "got": "fp32", "why": "w", "mechanism": "frame"}
    assert not site.is_as_asked


def test_no_gain_is_a_verdict_too(result):
    data = read_result({**result, "winner": None, "outcome": "no_gain", "verdict": "stay in fp32"})
    assert "winner" not in {row.role for row in data.trials}
    assert [item.figure for item in data.headlines] == ["fp32", "1.50×"]
    assert "stay in fp32" in render_report({**result, "winner": None, "verdict": "stay in fp32"})


def test_trials_that_were_not_isolated_are_not_again(result):
    assert read_result({**result, "isolation": "none: asked for"}).command.endswith(" --no-isolate")
    assert "isolate" not in read_result({**result, "isolation": "process"}).command


def test_the_command_is_one_that_a_shell_takes(result):
    assert read_result(result).command == (
        "autoprec tune 'my tasks/t.py:task' --target auto --trials 6 --max-loss-increase 0.5% --seed 3 "
        "--keep head=fp32 --study s"
    )
    assert read_result(result, command="autoprec tune t.py:task").command == "autoprec tune t.py:task"
    assert command_line("gpt", {"keep": ["a=bf16", "*.b=fp32"]}) == "autoprec tune gpt --keep a=bf16 --keep '*.b=fp32'"


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ({}, ""),
        ({"a": "bf16", "b": "bf16"}, "all bf16"),
        ({"a": "bf16", "b": "bf16", "head": "fp32"}, "bf16; head: fp32"),
        (dict(zip("abcdefghijk", ["x"] * 6 + ["y"] * 5, strict=True)), "x; g: y, h: y, i: y and 2 more"),
    ],
)
def test_a_mix_in_words(formats, words):
    assert describe_mix(formats) == words


ESTIMATE = {"kind": "estimated", "value": 1.5, "unit": "x", "target": "h100", "parts": {}, "assumptions": []}


def test_an_estimated_speed_stays_an_estimate(result):
    trials = [{**row, "speedup": row["speedup"] and ESTIMATE, "control": None} for row in result["trials"]]
    confirmations = [{**row, "speedup": ESTIMATE, "control": None} for row in result["confirmations"]]
    evidence = {"kind": "estimated", "throughput": {"kind": "estimated", "unit": "t/s", "value": 3, "baseline": 2}}
    elsewhere = {**result, "trials": trials, "confirmations": confirmations, "evidence": evidence}
    elsewhere["settings"] = {**result["settings"], "target": "h100"}
    data = read_result(elsewhere)
    assert not data.is_measured
    assert data.trials[1].speedup.shown(2, "×") == "1.50× (estimated)"
    assert data.confirmations[1].control is None
    speed = data.headlines[1]
    assert (speed.figure, speed.detail) == ("1.50× (estimated)", "estimated for h100, unconfirmed there")
    assert dict(data.facts)["throughput"].endswith("(estimated)")


def test_one_estimate_among_measurements_is_enough_for_an_estimated_report(result):
    mixed = [*result["trials"][:-1], {**result["trials"][-1], "speedup": ESTIMATE}]
    assert not read_result({**result, "trials": mixed}).is_measured


def test_a_gaps_interval_is_the_tasks_noise(result):
    rows = read_result(result).trials
    assert rows[0].loss_gap_pct.half is None  # the reference is itself
    assert rows[1].loss_gap_pct.half == pytest.approx(100 * 1.96 * 0.0004)
    assert rows[3].loss_gap_pct.half is None  # stopped after fewer steps


def test_a_repeat_has_no_curve_for_it_saw_other_batches(result):
    again = {**result["trials"][2], "number": 6, "origin": "repeat"}
    curves = read_result({**result, "trials": [*result["trials"], again]}).curves
    assert [curve.label for curve in curves] == ["fp32", "bf16", "bf16; b: fp32 (chosen)"]


def test_settings_of_scaler_and_recipe_in_words(result):
    scaler = {"init_scale": 65536.0, "growth_interval": 20, "enabled": True}
    trial = {**result["trials"][5], "scaler": scaler, "recipe": {"fp8": {"amax_history": 16}}, "num_skipped": 3}
    row = read_result({**result, "trials": [trial]}).trials[0]
    assert row.settings == "init scale 65536, growth interval 20, amax history 16"
    assert row.num_skipped == 3


def test_a_run_from_fresh_weights_is_said(result):
    run = {"gap": 0.0005, "chaos": 0.0002, "steps": 300}
    confirmations = [result["confirmations"][0], {**result["confirmations"][1], "from_scratch": run}]
    data = read_result({**result, "confirmations": confirmations})
    assert data.confirmations[1].from_scratch == "+0.050% over 300 steps; chance alone 0.020%"
    assert [row.is_chosen for row in data.confirmations] == [False, True]


def test_an_older_result_shows_what_is_there(result):
    new = ("explanations", "problem", "method", "objective", "isolation", "overhead_s")
    of_trials = ("origin", "worker", "started", "ended", "predicted_speedup", "predicted_gap", "recipe", "memory_bytes")
    older = {key: value for key, value in result.items() if key not in new}
    older["trials"] = [{k: v for k, v in row.items() if k not in of_trials} for row in result["trials"]]
    data = read_result(older)
    assert (data.groups, data.formats) == ((), ())
    assert data.trials[2].predicted == ""
    assert "This result holds no explanations" in render_report(older)


def test_how_it_was_found(result):
    settings = {**result["settings"], "seconds": 1000.0, "pricing_notes": ["head was left out"]}
    found = {**result, "overhead_s": {"space": 20.0, "scores": 10.0}, "isolation": "process", "settings": settings}
    found["objective"] = {"kind": "loss", "min_speedup": 1.5}
    data = read_result(found)
    method = dict(data.method)
    assert method["objective"] == "loss, at 1.5 times fp32's speed or more"
    assert method["neither training nor timing"] == "3.0% of it: space 20 s, scores 10 s"
    assert method["took"] == "16.7 min"
    assert data.notes == ("head was left out",)


def test_the_command_has_the_options_that_differ_from_their_defaults():
    settings = {"method": "loop", "objective": "loss", "min_speedup": 1.5, "workers": 4, "trial_timeout": 90.0}
    assert command_line("gpt", settings) == (
        "autoprec tune gpt --objective loss --min-speedup 1.5 --workers 4 --trial-timeout 90"
    )
    assert command_line("gpt", {"workers": 1, "objective": "speed", "isolate": True}) == "autoprec tune gpt"
    assert command_line("gpt", {"isolate": False}) == "autoprec tune gpt --no-isolate"
