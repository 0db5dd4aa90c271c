"""Readings in yardsticks, on a clock that steps move by hand."""

import time

import pytest

from autoprec.measure import yardstick
from autoprec.measure.costcache import YARDSTICK, CostCache, Reading
from autoprec.measure.yardstick import Ruler


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0
        #: what all work is slowed by
        load = 1.0

        def step(self, seconds):
            def call():
                self.now += self.load * seconds

            return call

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(yardstick, "_yardstick", lambda device: clock.step(0.001))
    monkeypatch.setattr(yardstick, "_units", {})
    return clock


def reading(value: float, low: float, high: float) -> Reading:
    return Reading(value=value, low=low, high=high, rounds=7, date="2026-11-29T00:00:00+00:00")


def test_a_cost_is_in_yardsticks(clock):
    ruler = Ruler("cpu")
    assert ruler.unit.value == pytest.approx(0.001)
    found = ruler.read({"short": clock.step(2e-5), "long": clock.step(0.04)}, "a label")
    assert found["short"].value == pytest.approx(0.02)
    assert found["long"].value == pytest.approx(40.0)
    assert found["long"].label == "a label long"
    assert ruler.seconds([found["long"]]).value == pytest.approx(0.04)


def test_a_reading_is_of_one_of_equal_parts(clock):
    found = Ruler("cpu").read({"step": clock.step(0.008)}, parts=8)
    assert found["step"].value == pytest.approx(1.0)


def test_a_busier_machine_does_not_change_a_cost(clock):
    ruler = Ruler("cpu")
    quiet = ruler.read({"step": clock.step(0.01)})["step"]
    clock.load = 7.0
    assert ruler.read({"step": clock.step(0.01)})["step"].value == pytest.approx(quiet.value)
    assert Ruler("cpu").unit == ruler.unit  # one in a process


def test_readings_of_all_steps_are_about_equally_long(clock):
    lengths = []

    def noted(step):
        def call():
            start = clock.now
            step()
            lengths.append(clock.now - start)

        return call

    calls = dict.fromkeys(("short", "long"), 0)

    def counted(name, seconds):
        step = clock.step(seconds)

        def call():
            calls[name] += 1
            step()

        return call

    Ruler("cpu").read({"short": counted("short", 1e-4), "long": counted("long", 0.02)})
    assert calls["short"] * 1e-4 == pytest.approx(calls["long"] * 0.02, rel=0.5)


def test_sums_add_values_and_their_uncertainties_in_quadrature(clock):
    measured = Ruler("cpu").seconds([reading(1.0, 0.7, 1.3), reading(2.0, 1.6, 2.4)], [1, 1])
    assert (measured.value, measured.low, measured.high) == pytest.approx((0.003, 0.0025, 0.0035))
    assert measured.rounds == 7
    assert measured.date == "2026-11-29T00:00:00+00:00"
    assert Ruler("cpu").seconds([reading(1.0, 0.7, 1.3)], [10]).low == pytest.approx(0.007)


def test_a_cache_sets_the_unit_of_the_process(clock, tmp_path):
    cache = CostCache(tmp_path / "costs.json", {})
    cache.put(YARDSTICK, reading(0.002, 0.001, 0.003))
    assert Ruler("cpu", cache).unit.value == 0.002
    ruler = Ruler("cpu")
    assert ruler.unit.value == 0.002
    assert ruler.seconds([ruler.read({"step": clock.step(0.01)})["step"]]).value == pytest.approx(0.02)


def test_no_steps_give_no_readings(clock):
    assert Ruler("cpu").read({}) == {}
