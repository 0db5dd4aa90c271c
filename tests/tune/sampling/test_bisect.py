import pytest

from autoprec.tune.sampling.bisect import front_mixes, next_on_front
from autoprec.tune.sampling.encoding import encode_numbers

FRONT = [(k,) for k in range(31)]


@pytest.mark.parametrize("cut", [0, 1, 7, 15, 30, 31])
def test_the_cut_is_found_in_five_halvings(cut: int):
    """Mixes from ``cut`` on keep the limit."""
    outcome, asked = {}, 0
    while (mix := next_on_front(FRONT, outcome)) is not None:
        assert mix not in outcome
        outcome[mix] = mix[0] >= cut
        asked += 1
    assert asked <= 5
    kept = [mix[0] for mix, good in outcome.items() if good]
    assert min(kept, default=31) == cut


def test_workers_split_what_is_open():
    outcome, asked = {}, []
    for _ in range(3):
        mix = next_on_front(FRONT, outcome)
        asked.append(mix[0])
        outcome[mix] = None
    assert sorted(asked) == [7, 15, 23]


def test_a_contradiction_ends_it():
    assert next_on_front(FRONT, {(3,): True, (9,): False}) is None
    assert next_on_front([], {}) is None


def test_the_front_goes_from_fast_to_harmless():
    harms = {"a": {"fp32": 0, "bf16": 0.1, "fp8_e4m3": 5}, "b": {"fp32": 0, "bf16": 0.2, "fp8_e4m3": 1}}
    costs = {"a": {"fp32": 0.6, "bf16": 0.2, "fp8_e4m3": 0.1}, "b": {"fp32": 0.6, "bf16": 0.2, "fp8_e4m3": 0.1}}
    front = front_mixes(encode_numbers(harms, costs, fixed=0.1))
    assert front[0] == (2, 2)
    assert front[-1] == (0, 0)
    assert (1, 2) in front
    assert (2, 1) not in front  # as fast as (1, 2), and worse
