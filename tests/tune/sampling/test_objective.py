import numpy as np
import pytest

from autoprec.errors import UsageError
from autoprec.tune.sampling.objective import Belief, Beliefs, Objective


def _beliefs(*rows: tuple[float, float, float, float]) -> Beliefs:
    return Beliefs(*(np.array(column) for column in zip(*rows, strict=True)))


def _belief(speedup: float, gap: float, gap_sd: float = 0.0, speedup_sd: float = 0.0) -> Belief:
    return Belief(speedup=speedup, loss_gap=gap, loss_gap_sd=gap_sd, speedup_sd=speedup_sd)


def test_speed_prefers_a_sure_gain_over_a_larger_one_that_breaks_the_budget():
    objective = Objective(kind="speed", budget=1.0)
    gain = objective.acquisition(
        _beliefs((0.8, 0.01, 0.5, 0.1), (0.6, 0.01, 1.5, 0.1), (0.6, 0.01, 1.0, 0.1), (1.1, 0.001, 0.1, 0.1)), 1.0
    )
    assert gain[0] == pytest.approx(0.2, rel=0.01)
    assert gain[1] < 1e-5
    assert gain[2] == pytest.approx(0.5 * 0.4, rel=0.01)  # even odds
    assert gain[3] < 1e-9


def test_loss_wants_the_speed_first():
    objective = Objective(kind="loss", budget=1.0, min_speedup=2.0)
    gain = objective.acquisition(_beliefs((0.4, 0.01, 0.3, 0.01), (0.6, 0.01, 0.1, 0.01)), 0.5)
    assert gain[0] == pytest.approx(0.2, rel=0.01)
    assert gain[1] < 1e-9
    assert objective.is_feasible(_belief(2.1, 9.0))
    assert not objective.is_feasible(_belief(2.1, 0.0, speedup_sd=0.2))


def test_feasible_needs_room_for_the_uncertainty():
    objective = Objective(kind="speed", budget=1.0)
    assert objective.is_feasible(_belief(1.0, 0.8, 0.1))
    assert not objective.is_feasible(_belief(1.0, 0.95, 0.1))
    assert objective.is_feasible(_belief(1.0, 0.95, 0.1), caution=0.0)


def test_the_best_comes_first():
    a, b = _belief(2.0, 0.5), _belief(1.5, 0.1)
    assert Objective(kind="speed", budget=1.0).rank(a) < Objective(kind="speed", budget=1.0).rank(b)
    loss = Objective(kind="loss", budget=1.0, min_speedup=1.2)
    assert loss.rank(b) < loss.rank(a)


def test_the_shortlist_weighs_speed_with_the_chance_to_hold():
    objective = Objective(kind="speed", budget=1.0)
    beliefs = {
        "broken": _belief(3.0, 1.5, 0.1),
        "fastest": _belief(2.05, 0.85, 0.1),
        "sure": _belief(2.0, 0.2, 0.1),
        "slow": _belief(1.2, 0.1, 0.1),
        "slower than the fallback": _belief(0.9, 0.0, 0.1),
    }
    assert objective.shortlist(beliefs) == ["fastest", "sure", "slow", "slower than the fallback"]
    assert objective.shortlist(beliefs, noise=0.3) == ["sure", "fastest", "slow", "slower than the fallback"]
    assert objective.shortlist(beliefs, noise=0.3, fallback=1.5)[-2:] == ["slow", "slower than the fallback"]
    loss = Objective(kind="loss", budget=1.0, min_speedup=1.5)
    assert loss.shortlist(beliefs, noise=0.3) == ["sure", "fastest", "broken"]


def test_a_front_takes_turns():
    objective = Objective(kind="front", budget=0.01)
    assert len({objective.budget_at(turn) for turn in range(5)}) == 5
    assert {Objective(kind="speed", budget=0.01).budget_at(turn) for turn in range(5)} == {0.01}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "fast", "budget": 1}, "'fast' is unknown; allowed: speed, loss, memory, front"),
        ({"kind": "speed", "budget": 0}, "budget is 0; it must be above 0"),
        ({"kind": "loss", "budget": 1}, "'loss' needs the speed to reach"),
        ({"kind": "speed", "budget": 1, "min_speedup": 2}, "no other objective takes it"),
        ({"kind": "loss", "budget": 1, "min_speedup": -1}, "min_speedup is -1"),
    ],
)
def test_a_wrong_objective_is_refused(fields: dict, message: str):
    with pytest.raises(UsageError, match=message):
        Objective(**fields)


def test_objectives_in_words():
    assert str(Objective(kind="speed", budget=0.005)) == "the fastest mix whose loss gap is at most 0.500%"
    assert str(Objective(kind="memory", budget=0.005)).startswith("the smallest mix")
    assert str(Objective(kind="loss", budget=1, min_speedup=1.5)) == (
        "the lowest loss gap at 1.5 times fp32's speed or more"
    )
