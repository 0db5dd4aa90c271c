import pytest

from autoprec.report.explained import limit_headline, read_groups, saved_thing

BUDGET = 0.005


def option(name: str, *, chosen: bool = False, saving: float | None = None, harm: float = 0.0, sd: float = 0.0) -> dict:
    after = None if saving is None else {"saving": saving, "saving_sd": sd, "harm": harm, "harm_sd": sd}
    predicted = {"saving_s": 0.1, "saving": 0.11, "harm": 0.001}
    return {
        "format": name, "is_chosen": chosen, "num_trials": 0 if saving is None else 2,
        "predicted": None if name == "fp32" else predicted, "after_trials": after, "note": "",
    }  # fmt: skip


def entry(group: str, options: list[dict], limit: str = "none better", change: dict | None = None, **rest) -> dict:
    return {
        "group": group, "num_sites": 1, "flops_share": 0.5, "kind": "measured", "of": "time",
        "chosen": next(o["format"] for o in options if o["is_chosen"]), "options": options, "limit": limit,
        "sentence": "a sentence.", "would_change": change, **rest,
    }  # fmt: skip


@pytest.fixture
def explanations() -> list[dict]:
    a = [option("fp32"), option("bf16", chosen=True, saving=0.3, harm=0.0004, sd=0.01), option("fp8_e4m3")]
    b = [option("fp32"), option("bf16", chosen=True, saving=0.1, harm=0.002, sd=0.0001), option("rules", saving=0.0)]
    budget = {"format": "fp8_e4m3", "saving": 0.02, "harm": 0.01}
    return [entry("a", a, "budget", budget), entry("b", b)]


def test_formats_are_columns_and_a_cell_is_in_its_own(explanations):
    formats, rows = read_groups(explanations, BUDGET)
    assert formats == ("fp32", "bf16", "fp8_e4m3", "rules")
    assert [[cell is not None for cell in row.cells] for row in rows] == [[1, 1, 1, 0], [1, 1, 0, 1]]
    assert [row.cells[1].is_chosen for row in rows] == [True, True]
    assert rows[0].size == "1 site, 50% of FLOPs"


def test_what_trials_say_has_an_interval_and_what_was_predicted_none(explanations):
    _, (row, _) = read_groups(explanations, BUDGET)
    bf16, fp8 = row.cells[1:3]
    assert (bf16.saving.value, bf16.saving.half) == (pytest.approx(30.0), pytest.approx(1.96))
    assert fp8.saving is None
    assert fp8.predicted == "11.0%, +0.100%"


def test_a_cell_is_as_hot_as_its_harm_is_large(explanations):
    _, rows = read_groups(explanations, BUDGET)
    assert [cell.heat for cell in rows[0].cells if cell] == ["unknown", "low", "inside"]
    _, rows = read_groups(explanations, 0.0005)
    assert [cell.heat for cell in rows[0].cells if cell] == ["unknown", "inside", "over"]


def test_shares_are_of_what_is_clear_of_the_noise(explanations):
    _, rows = read_groups(explanations, BUDGET)
    assert [row.saving_share for row in rows] == [pytest.approx(0.75), pytest.approx(0.25)]
    assert [row.harm_share for row in rows] == [None, 1.0]  # the first harm is within its interval


def test_what_no_trial_had_counts_as_predicted():
    _, (row,) = read_groups([entry("a", [option("fp32"), option("bf16", chosen=True)])], BUDGET)
    assert row.saving.shown(1, "%") == "11.0% (estimated)"


def test_the_limit_that_costs_most_is_the_headline(explanations):
    item = limit_headline(explanations)
    assert item.figure == "the loss budget"
    assert "1 group would save 2.0% of the fp32 step" in item.detail
    more = entry("c", explanations[0]["options"], "not measured", {"format": "x", "saving": 0.05, "harm": 0.0})
    assert limit_headline([*explanations, more]).figure == "the number of trials"
    assert "estimated" in limit_headline([{**more, "kind": "estimated"}]).detail


def test_where_nothing_would_be_better_that_is_said(explanations):
    assert limit_headline(explanations[1:]).detail == "no group has another format that is better beyond the noise"
    assert limit_headline([]) is None


def test_what_is_saved_is_named(explanations):
    assert saved_thing(explanations) == "the fp32 step's time"
    assert saved_thing([{**explanations[0], "kind": "estimated"}]).endswith("estimated")
    assert "memory" in saved_thing([{**explanations[0], "of": "memory"}])


def test_a_loss_of_time_is_no_saving_with_a_minus():
    (slower,) = read_groups([entry("a", [option("bf16", chosen=True, saving=-0.03, sd=0.002)])], BUDGET)[1]
    assert slower.cells[0].saves == "takes 3.0 ± 0.4% more"
