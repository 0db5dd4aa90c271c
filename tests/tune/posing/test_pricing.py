"""Problems priced from a space: against the whole step's estimate, and by hand."""

import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.analyze import analyze
from autoprec.convert import plan_for
from autoprec.errors import UsageError
from autoprec.estimate import estimate_step
from autoprec.measure.microbench import measure_costs
from autoprec.measure.replay import record_calls
from autoprec.plan import Formats
from autoprec.planner.front import front
from autoprec.rulebook import load_rulebook
from autoprec.target import load_target
from autoprec.tune.posing.pricing import make_problem
from autoprec.tune.posing.sitecosts import SiteCosts, estimated_costs, formats_of, measured_costs, uniform
from autoprec.tune.space import OTHER, RULES, build_space

H100 = load_target("h100")
BF16 = Formats.all("bf16")


class Block(nn.Module):
    """Attention, then a gated layer: residual sums, views, norms and followers between products."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return torch.softmax(self.second(F.gelu(self.first(x))), -1).sum()


def spaced(model, data, keep=(), mode="training"):
    """The space of a model on an H100, and its rows."""

    def run(model):
        return model(data)

    base = plan_for(model, H100, run, "O1", mode, None, load_rulebook())
    rows = analyze(model, run, target=H100, mode=mode, formats=("bf16",)).rows
    formats = [name for name in H100.formats if name.startswith("fp8")]
    return build_space([row.site for row in rows], base, formats, low_format="bf16", keep=keep), rows


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(11, (2, 8))
    return lambda **options: spaced(model, tokens, **options)


@pytest.fixture(scope="module")
def mlp():
    return spaced(Mlp(), torch.randn(5, 8))


def flat_harms(space):
    """A harm by name for each group, larger for fewer bits."""
    size = {"fp32": 0.0, RULES: 0.5, "bf16": 1.0, "fp16": 1.0, "fp8_e4m3": 4.0, "fp8_e5m2": 8.0}
    return {group.name: {choice: size[choice] for choice in group.choices} for group in space.groups}


def by_hand(seconds, **options):
    """Casts take a second for each element."""
    given = {"kind": "measured", "device": "made up", "step_s": None, "missing": {}} | options
    return SiteCosts(seconds=seconds, cast_s=lambda numel, source, name: float(numel), **given)


def estimated(space, rows, mix):
    return estimate_step(rows, formats_of(space.plan_of(mix)), H100, low="bf16", mode=space.base.mode).value


@pytest.mark.parametrize("keep", [(), ("blocks.1.*=fp32",), ("head=bf16",)])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_problem_of_uniform_mixes_is_the_estimate_of_their_whole_step(keep, mode, transformer):
    space, rows = transformer(keep=keep, mode=mode)
    problem = make_problem(space, rows, flat_harms(space), estimated_costs(space, rows, H100)).problem
    for choice in ("fp32", "bf16", "fp8_e4m3"):
        for other in ("fp32", RULES, "bf16"):
            mix = uniform(space, choice, other)
            assert problem.cost_s(mix) == pytest.approx(estimated(space, rows, mix)), (choice, other)


def test_any_mix_costs_nearly_what_its_whole_step_is_estimated_at(transformer):
    space, rows = transformer()
    problem = make_problem(space, rows, flat_harms(space), estimated_costs(space, rows, H100)).problem
    draw = random.Random(0)
    for _ in range(40):
        mix = {group.name: draw.choice(group.choices) for group in space.groups}
        assert problem.cost_s({**mix, OTHER: RULES}) == pytest.approx(
            estimated(space, rows, {**mix, OTHER: RULES}), rel=0.02
        )
        assert problem.cost_s(mix) == pytest.approx(estimated(space, rows, mix), rel=0.1)


def test_a_device_that_is_elsewhere_runs_what_its_kernels_can(transformer):
    space, rows = transformer()

    def no_fp8(plan):
        return replace(
            plan, rules=tuple(replace(r, formats=BF16) if "fp8" in str(r.formats) else r for r in plan.rules)
        )

    seconds = estimated_costs(space, rows, H100, as_there=no_fp8).seconds
    assert seconds["head"]["fp8_e4m3"] == seconds["head"]["bf16"] != seconds["head"]["fp32"]


def test_groups_sum_their_sites_and_casts_are_counted_where_formats_meet(mlp):
    space, rows = mlp
    seconds = {
        "first": {"fp32": 100.0, "bf16": 50.0, "fp8_e4m3": 30.0, "fp8_e5m2": 30.0},
        "second": {"fp32": 60.0, "bf16": 40.0, "fp8_e4m3": 35.0, "fp8_e5m2": 35.0},
        "::gelu#0": {"fp32": 7.0, "bf16": 5.0},
        "::softmax#0": {"fp32": 3.0, "bf16": 2.0},
        "::sum#0": {"fp32": 2.0, "bf16": 1.0},
    }
    priced = make_problem(space, rows, flat_harms(space), by_hand(seconds, step_s=200.0))
    problem = priced.problem
    assert priced.notes == ()
    assert (problem.kind, problem.device, problem.fixed_s) == ("measured", "made up", 200 - 172)
    first, second = 5 * 16, 5 * 4  # elements of the two results
    expected = {
        ("fp32", "fp32", "fp32"): 200,
        ("bf16", "bf16", RULES): 200 - 172 + 50 + 40 + 5 + 3 + 2 + second,  # softmax is fp32: one cast
        ("bf16", "bf16", "bf16"): 200 - 172 + 50 + 40 + 5 + 2 + 1,
        ("bf16", "bf16", "fp32"): 200 - 172 + 50 + 40 + 7 + 3 + 2 + 2 * first + second,  # into gelu, out of it, softmax
        ("bf16", "fp32", RULES): 200 - 172 + 50 + 60 + 5 + 3 + 2 + first,  # gelu follows; its result is cast
        ("fp8_e4m3", "bf16", RULES): 200 - 172 + 30 + 40 + 5 + 3 + 2 + second,  # fp8 gives 16 bit
    }
    for (a, b, other), cost_s in expected.items():
        assert problem.cost_s({"first": a, "second": b, OTHER: other}) == cost_s, (a, b, other)


def test_harms_are_summed_over_sites_or_given_for_the_group(transformer):
    space, rows = transformer()
    group = next(g for g in space.groups if g.num_sites == 2)
    harms = flat_harms(space)
    del harms[group.name]
    harms |= {f"blocks.{k}.{group.name.rpartition('.')[2]}": {c: 10.0**k for c in group.choices} for k in range(2)}
    problem = make_problem(space, rows, harms, by_hand({})).problem
    options = next(g for g in problem.groups if g.name == group.name).options
    assert [option.harm for option in options] == [0.0] + [11.0] * (len(group.choices) - 1)


def test_an_infinite_harm_takes_the_choice_away_and_is_said(mlp):
    space, rows = mlp
    harms = flat_harms(space)
    harms["first"]["fp8_e5m2"] = math.inf
    priced = make_problem(space, rows, harms, by_hand({}))
    assert "fp8_e5m2" not in [option.format for option in priced.problem.groups[0].options]
    assert "first can't be fp8_e5m2: it gives numbers that aren't finite" in priced.notes


def test_a_harm_that_is_missing_is_an_error_that_names_it(mlp):
    space, rows = mlp
    harms = flat_harms(space)
    del harms["second"]["bf16"]
    with pytest.raises(UsageError, match="'second' has choice 'bf16', and there is no harm of it for 'second'"):
        make_problem(space, rows, harms, by_hand({}))


def test_what_could_not_be_priced_takes_what_it_falls_back_to_and_is_said(mlp):
    space, rows = mlp
    seconds = {"first": {"fp32": 100.0, "bf16": 50.0}, "second": {"fp32": 60.0}}
    missing = {"first": "fp8_e4m3 can't run alone: no kernel", "::gelu#0": "the budget was spent"}
    priced = make_problem(space, rows, flat_harms(space), by_hand(seconds, missing=missing, step_s=150.0))
    costs = {(g.name, o.format): o.cost_s for g in priced.problem.groups for o in g.options}
    assert costs["first", "fp8_e4m3"] == 50
    assert costs["second", "fp8_e4m3"] == 60
    assert priced.problem.fixed_s == 0
    assert "first in fp8_e4m3 costs what it does in bf16: fp8_e4m3 can't run alone: no kernel" in priced.notes
    assert "::gelu#0 is left out of every choice: the budget was spent" in priced.notes
    assert any("take 160 s one by one and 150 s together" in note for note in priced.notes)


def test_costs_measured_on_this_machine_make_a_problem_with_a_front(mlp):
    space, rows = mlp
    data = torch.randn(5, 8)
    calls = record_calls(Mlp(), lambda model: model(data))
    costs = measure_costs(calls, dict.fromkeys(("first", "second"), ("fp32", "bf16")), budget_s=math.inf)
    priced = make_problem(space, rows, flat_harms(space), measured_costs(costs))
    assert priced.problem.kind == "measured"
    assert all(option.cost_s > 0 for group in priced.problem.groups[:2] for option in group.options)
    assert "first in fp8_e4m3 costs what it does in bf16: fp8_e4m3 wasn't priced" in priced.notes
    assert "::gelu#0 is left out of every choice: it was not priced" in priced.notes
    assert front(priced.problem)[-1].harm == 0
