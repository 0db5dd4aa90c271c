"""What is said of a choice, on trials whose savings and harms are known sums."""

import json

import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from autoprec.measure import Measurement
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planner.problem import Option, Problem, ProblemGroup
from autoprec.tune.answers.explain import explain
from autoprec.tune.answers.reasons import Chosen, Swap, find_reason, percent
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.sampling.objective import Objective
from autoprec.tune.sampling.sampler import CONSTRAINT, plan_sampler
from autoprec.tune.space import Group, Space

BUDGET = 0.005
CHOICES = ("fp32", "bf16", "fp8_e4m3")
#: Seconds of an fp32 step of 1 s that each choice saves, and its harm; the planner is told half the harm of all.
SAVES = {"a": (0.0, 0.2, 0.3), "b": (0.0, 0.1, 0.15), "c": (0.0, 0.0, 0.0)}
HARMS = {"a": (0.0, 0.0002, 0.003), "b": (0.0, 0.0001, 0.02), "c": (0.0, 0.0, 0.0)}
PIN = PlanRule(match=("head",), formats=Formats.all("fp32"), reason="kept by 'head'", source="user")


def problem() -> Problem:
    def option(group: str, k: int) -> Option:
        return Option(format=CHOICES[k], harm=0.5 * HARMS[group][k], cost_s=0.3 - SAVES[group][k])

    groups = tuple(ProblemGroup(name=g, options=tuple(option(g, k) for k in range(3))) for g in SAVES)
    return Problem(groups=groups, fixed_s=0.1, kind="measured", device="a device")


def space(choices: dict[str, tuple[str, ...]] | None = None) -> Space:
    groups = tuple(
        Group(
            name=name,
            match=(name,),
            choices=(choices or {}).get(name, CHOICES),
            rules_choice="bf16",
            flops_share=0.4,
            num_sites=1,
        )
        for name in SAVES
    )
    return Space(groups=groups, base=Plan(rules=()), pins=(PIN,), low_format="bf16", scaler_choices={})


def row(number: int, mix: dict[str, str]) -> TrialRow:
    saved, gap = (sum(table[g][CHOICES.index(mix[g])] for g in mix) for table in (SAVES, HARMS))
    speed = 1 / (1 - saved)
    speedup = Measurement(value=speed, low=0.999 * speed, high=1.001 * speed, rounds=9, unit="x", device="a device")
    return TrialRow(
        number=number, name="search", plan_sha256=str(number), formats=mix, loss_gap=gap, speedup=speedup
    )  # fmt: skip


def frozen(one: TrialRow, choices: dict[str, tuple[str, ...]]) -> optuna.trial.FrozenTrial:
    trial = optuna.trial.create_trial(
        params=one.formats,
        distributions={name: CategoricalDistribution(choices[name]) for name in one.formats},
        value=one.speedup.value,
    )
    trial.number = one.number
    trial.set_constraint(CONSTRAINT, one.loss_gap - BUDGET)
    return trial


MIXES = (("fp32",) * 3, ("bf16",) * 3, ("fp8_e4m3", "bf16", "fp32"), ("bf16", "fp32", "fp32"), ("fp8_e4m3",) * 3)


def explained(winner=("fp8_e4m3", "bf16", "fp32"), mixes=MIXES, choices=None, objective=None) -> dict[str, dict]:
    rows = [row(k, dict(zip(SAVES, mix, strict=True))) for k, mix in enumerate(mixes)]
    objective = objective or Objective(kind="speed", budget=BUDGET)
    given = space(choices)
    of = {group.name: group.choices for group in given.groups}
    found = explain(
        given,
        problem(),
        rows,
        [frozen(one, of) for one in rows],
        plan_sampler(given, BUDGET, 1e-5, problem=problem(), objective=objective),
        None if winner is None else dict(zip(SAVES, winner, strict=True)),
        objective,
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == list(found)
    return {entry["group"]: entry for entry in found}


def options(entry: dict) -> dict[str, dict]:
    return {option["format"]: option for option in entry["options"]}


def test_after_the_trials_a_choice_has_the_effects_that_made_them():
    found = explained()
    for group, name in (("a", "bf16"), ("a", "fp8_e4m3"), ("b", "bf16")):
        after, k = options(found[group])[name]["after_trials"], CHOICES.index(name)
        assert after["saving"] == pytest.approx(SAVES[group][k], abs=max(3 * after["saving_sd"], 0.01))
        assert after["harm"] == pytest.approx(HARMS[group][k], abs=max(3 * after["harm_sd"], 1e-4))
        assert 0 < after["saving_sd"] < 0.05


def test_what_was_predicted_is_the_planners_and_stays_apart():
    fp8 = options(explained()["a"])["fp8_e4m3"]
    assert fp8["predicted"]["saving_s"] == pytest.approx(0.3)
    assert fp8["predicted"]["saving"] == pytest.approx(0.3)
    assert fp8["predicted"]["harm"] > 0


def test_a_choice_that_no_trial_had_has_no_number_after_the_trials():
    found = options(explained(mixes=MIXES[:4])["b"])["fp8_e4m3"]
    assert (found["num_trials"], found["after_trials"]) == (0, None)
    assert found["predicted"] is not None


def test_the_budget_is_named_where_it_holds_a_faster_format_off():
    found = explained()["b"]
    assert found["limit"] == "budget"
    assert found["would_change"]["format"] == "fp8_e4m3"
    assert "fp8_e4m3 here would save another" in found["sentence"]
    assert "left of the budget" in found["sentence"]


def test_where_no_format_is_faster_it_says_so():
    found = explained()["c"]
    assert found["limit"] == "none better"
    assert "more than the noise" in found["sentence"]
    assert found["would_change"] is None


def test_a_mix_that_a_trial_measured_is_told_by_the_trial():
    found = explained(winner=("bf16", "fp32", "fp32"))
    assert found["a"]["sentence"].endswith("no trial measured that mix.")
    mixes = (*MIXES, ("bf16", "fp8_e4m3", "fp32"), ("bf16", "bf16", "fp32"))
    found = explained(winner=("bf16", "bf16", "fp32"), mixes=mixes)["b"]
    assert "trial 5 measured that mix: its loss gap is 2.0%, where 0.50% is allowed" in found["sentence"]


def test_a_pin_is_the_users():
    found = explained()["head"]
    assert (found["limit"], found["chosen"], found["options"]) == ("pinned", "fp32", [])
    assert found["sentence"] == "Pinned by the user: kept by 'head'."


def test_a_group_without_another_choice_says_so():
    mixes = [(*mix[:2], "fp32") for mix in MIXES]
    found = explained(mixes=mixes, choices={"c": ("fp32",)})
    assert found["c"]["limit"] == "only choice"
    notes = [option["note"] for option in found["c"]["options"]]
    assert notes[0] == "the reference"
    assert all(note.startswith("left out") for note in notes[1:])


def test_where_fp32_stays_nothing_was_confirmed():
    found = explained(winner=None)["a"]
    assert (found["chosen"], found["limit"]) == ("fp32", "not confirmed")
    assert "another" not in found["sentence"]


def test_the_lowest_loss_is_held_off_by_the_speed_asked_for():
    objective = Objective(kind="loss", budget=BUDGET, min_speedup=1.3)
    found = explained(winner=("fp8_e4m3", "fp32", "fp32"), objective=objective)["a"]
    assert found["limit"] == "speed"
    assert "below the 1.3 asked for" in found["sentence"]


def test_an_estimated_saving_says_so():
    swap = Swap(format="nvfp4", saving=0.012, saving_noise=0.001, harm=0.0031, harm_noise=0.0)
    chosen = Chosen(is_confirmed=True, cost=0.7, gap=0.0045, kind="estimated", of="time")
    reason = find_reason("bf16", [swap], chosen, Objective(kind="speed", budget=BUDGET))
    assert reason.sentence == (
        "nvfp4 here is estimated to save another 1.2% of the fp32 step and is expected to cost 0.31% of loss, over the "
        "0.050% that is left of the budget."
    )


@pytest.mark.parametrize(("share", "text"), [(0.123, "12%"), (0.0123, "1.2%"), (0.0031, "0.31%"), (0.00012, "0.012%")])
def test_percent(share, text):
    assert percent(share) == text
