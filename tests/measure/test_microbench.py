"""Costs of a small model's sites: measured where they can be, with a reason where not, and never twice."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import UsageError
from autoprec.measure import Measurement, microbench
from autoprec.measure.costcache import CostCache
from autoprec.measure.microbench import CastCost, Costs, measure_costs, measure_seconds
from autoprec.measure.replay import record_calls
from autoprec.measure.yardstick import Ruler
from autoprec.plan import Formats


class Tiny(nn.Module):
    """Two equal layers, one of which is called twice, a product of activations, and a call that can't be repeated."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = F.gelu(self.first(x))
        x = self.second(self.second(x))
        return (x @ x.transpose(-1, -2)).add_(1.0)


@pytest.fixture(scope="module")
def calls():
    x = torch.randn(8, 16).requires_grad_()
    return record_calls(Tiny(), lambda m: m(x))


@pytest.fixture
def cache(tmp_path):
    return CostCache(tmp_path / "costs.json", {"device": "this one"})


@pytest.fixture
def no_reading(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a reading was taken")

    return lambda: monkeypatch.setattr(Ruler, "read", fail)


CHOICES = {"first": ["bf16"], "second": ["bf16", "fp32"], "::gelu#0": ["bf16"], "::matmul#0": ["bf16"]}


@pytest.fixture(scope="module")
def costs(calls):
    return measure_costs(calls, {**CHOICES, "::add#0": ["bf16"], "gone": ["bf16"]})


def test_each_site_has_a_measurement_for_each_choice_and_fp32(costs):
    assert set(costs.seconds) == set(CHOICES)
    assert all(set(found) == {"fp32", "bf16"} for found in costs.seconds.values())
    for found in costs.seconds.values():
        for measured in found.values():
            assert isinstance(measured, Measurement)
            assert 0 <= measured.low <= measured.value <= measured.high < 1
            assert measured.unit == "s"
            assert measured.rounds >= 5
            assert measured.versions["torch"] == torch.__version__


def test_what_cannot_be_measured_says_why(costs):
    assert costs.missing == {"gone": "the model made no call of it", "::add#0": "add_ writes its argument"}


def test_equal_calls_are_measured_once_and_counted(costs):
    for choice in ("fp32", "bf16"):
        once, twice = costs.seconds["first"][choice], costs.seconds["second"][choice]
        assert twice.value == pytest.approx(2 * once.value)
        assert twice.high - twice.value == pytest.approx(2 * (once.high - once.value))


def test_casts_are_a_line_through_two_sizes(costs):
    assert set(costs.casts) == {("fp32", "bf16"), ("bf16", "fp32")}
    launch = costs.casts["fp32", "bf16"].launch_s
    one, thousand = costs.cast_s(1, "fp32", "bf16"), costs.cast_s(1001, "fp32", "bf16")
    assert one > 0 <= launch
    assert thousand - one == pytest.approx(1000 * costs.casts["fp32", "bf16"].per_element_s)
    assert costs.cast_s(10**6, "fp32", "fp32") == costs.cast_s(0, "fp32", "bf16") == 0.0


def test_a_cast_that_was_not_measured_is_refused():
    cost = CastCost(launch_s=1e-6, per_element_s=1e-9)
    costs = Costs(seconds={}, missing={}, casts={("fp32", "bf16"): cost}, mode="training", device="cpu")
    assert costs.cast_s(1000, "fp32", "bf16") == pytest.approx(2e-6)
    with pytest.raises(UsageError, match="'fp32' to 'fp16' wasn't measured; measured: fp32 to bf16"):
        costs.cast_s(1000, "fp32", "fp16")


def test_nothing_is_measured_twice(calls, cache, no_reading):
    first = measure_costs(calls, CHOICES, cache=cache)
    no_reading()
    again = measure_costs(calls, CHOICES, cache=CostCache(cache.path, cache.identity))
    assert again == first


def test_a_mode_a_format_and_a_recipe_have_costs_of_their_own(calls, cache, no_reading):
    measure_costs(calls, {"first": ["bf16"]}, cache=cache)
    no_reading()
    measure_costs(calls, {"first": ["bf16"]}, cache=cache, recipe={"recipe": "current"})  # of no matter to bf16
    for settings in ({"mode": "inference"}, {"formats_of": lambda name: Formats.all("fp16")}):
        with pytest.raises(AssertionError, match="a reading was taken"):
            measure_costs(calls, {"first": ["bf16"]}, cache=cache, **settings)


def test_the_budget_goes_to_the_largest_first(calls, monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(microbench.time, "monotonic", lambda: float(next(now)))
    seen = []
    costs = measure_costs(calls, CHOICES, budget_s=1.5, on_progress=lambda *event: seen.append(event))
    assert seen[0] == (1, 3, "linear 8x16 16x16 16")
    assert [event[2].split()[0] for event in seen] == ["linear", "matmul", "gelu"]
    assert set(costs.seconds) == {"first", "second"}
    assert costs.missing == dict.fromkeys(("::gelu#0", "::matmul#0"), "the budget of 1.5 s was spent on larger ones")


def test_a_spent_budget_still_gives_what_is_known(calls, cache):
    known = measure_costs(calls, CHOICES, cache=cache)
    assert measure_costs(calls, CHOICES, cache=cache, budget_s=0.0).seconds == known.seconds


def test_formats_that_a_site_does_not_get_are_missing_and_the_others_are_not(calls):
    costs = measure_costs(calls, {"::matmul#0": ["bf16", "fp8_e4m3"]})
    assert set(costs.seconds["::matmul#0"]) == {"fp32", "bf16"}
    assert "fp8_e4m3 can't run alone: ConversionError" in costs.missing["::matmul#0"]
    assert "only linear layers" in costs.missing["::matmul#0"]


def test_an_op_that_fails_alone_is_missing_with_its_error():
    class Picky(nn.Module):
        def forward(self, x):
            return torch.linalg.cholesky(x @ x.T)

    calls = record_calls(Picky(), lambda m: m(torch.eye(3)), "inference")
    costs = measure_costs(calls, {"::linalg_cholesky#0": ["bf16"]}, mode="inference")
    assert costs.seconds == {}
    assert "fp32 can't run alone: _LinAlgError" in costs.missing["::linalg_cholesky#0"]


@pytest.mark.parametrize("name", ["follow", "fixed"])
def test_a_choice_that_is_no_format_is_refused(calls, name):
    with pytest.raises(UsageError, match="no number format"):
        measure_costs(calls, {"first": [name]})


def test_eight_bits_are_measured_between_16_bit_activations(calls):
    formats = {"fp8_e4m3": Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")}
    costs = measure_costs(
        calls, {"first": ["fp8_e4m3"]}, formats_of=lambda name: formats.get(name) or Formats.all(name)
    )
    assert set(costs.seconds["first"]) == {"fp32", "fp8_e4m3"}
    assert set(costs.casts) == {("fp32", "bf16"), ("bf16", "fp32")}


def test_inference_has_no_casts_of_gradients(calls, cache):
    costs = measure_costs(calls, CHOICES, mode="inference", cache=cache)
    assert costs.mode == "inference"
    assert set(costs.seconds) == set(CHOICES)


def test_steps_and_costs_share_a_unit(calls, cache):
    measure_costs(calls, {"first": []}, cache=cache)
    unit = cache.get("yardstick")
    measured = measure_seconds({"sum": lambda: torch.ones(1000).sum()}, cache=cache)["sum"]
    assert cache.get("yardstick") == unit
    assert 0 < measured.low <= measured.value <= measured.high


def test_the_caller_notices_nothing(calls, caplog):
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        measure_costs(calls, CHOICES)
    assert caplog.text == ""
    assert torch.equal(torch.get_rng_state(), state)


def test_training_is_measured_with_its_backward_by_a_caller_without_gradients(calls, monkeypatch):
    seen = []
    monkeypatch.setattr(microbench, "seconds_of", lambda step, device: seen.append(step) or 1.0)
    with torch.no_grad():
        measure_costs(calls, {"first": ["bf16"]})
    with torch.enable_grad(), torch.profiler.profile() as profile:
        seen[0]()
    assert any("AddmmBackward" in event.key for event in profile.key_averages())


def test_what_was_measured_before_an_interrupt_is_kept(calls, cache, no_reading):
    def interrupt(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_costs(calls, CHOICES, cache=cache, on_progress=interrupt)
    no_reading()
    again = CostCache(cache.path, cache.identity)
    assert set(measure_costs(calls, {"first": ["bf16"]}, cache=again).seconds) == {"first"}
