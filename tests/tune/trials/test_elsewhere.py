import pytest
import torch
from torch import nn

from autoprec.convert import convert, receipt
from autoprec.errors import TargetError
from autoprec.estimate import Estimate
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.target import load_target
from autoprec.tasks import Task
from autoprec.tune.trials.bench import Bench, Effort
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.elsewhere import record_estimator, refuse_unknown
from autoprec.tune.trials.speed import EstimatedComparison
from autoprec.tune.trials.trainer import Trainer

CPU = torch.device("cpu")
FP32 = Plan(rules=(), level="O0")
FP8 = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


def _plan(formats):
    """These formats for linear layers, bf16 for the rest."""
    linear = PlanRule(match=("*::linear",), formats=formats)
    return Plan(rules=(linear, PlanRule(match=("*",), formats=Formats.all("bf16"))), target="h100")


class Net(nn.Module):
    """Two layers that any FP8 kernel takes, one of 24 features, which none takes, and a product written by hand."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 24)
        self.weight = nn.Parameter(torch.randn(16, 24) / 5)

    def forward(self, x):
        y = self.odd(torch.tanh(self.down(torch.tanh(self.up(x)))))
        return nn.functional.linear(y, self.weight)


def _batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(64, 32, generator=generator)
        yield x, x[:, :16].sin()


def _build(seed):
    torch.manual_seed(seed)
    return Net()


TASK = Task(
    name="net",
    build_model=_build,
    batches=_batches,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
)


def _bench(target="h100", **changes):
    checkpoint = Checkpoint(weights=TASK.build_model(0).state_dict(), origin="")
    fields = {"elsewhere": load_target(target), "effort": Effort(steps=20, rounds=5)}
    return Bench(task=TASK, checkpoint=checkpoint, device=CPU, seed=0, budget=0.5, **{**fields, **changes})


@pytest.fixture(scope="module")
def estimator():
    model, batch = TASK.build_model(0), next(TASK.stream(1))
    return record_estimator(TASK, model, lambda m: TASK.loss(m, batch), load_target("h100"), optimizer_bytes=8.0)


def test_a_trial_trains_with_emulated_operands_and_prices_its_speed():
    bench = _bench()
    outcome = bench.trial(_plan(FP8))
    assert outcome.state == "complete", outcome.note
    assert isinstance(outcome.comparison, EstimatedComparison)
    assert isinstance(outcome.memory_bytes, Estimate)
    assert outcome.comparison.speedup.target == "h100"

    emulated = bench.estimator().as_there(_plan(FP8))
    trainer = Trainer(TASK, bench.checkpoint, emulated, device=CPU, seed=0)
    assert list(outcome.losses) == trainer.losses(bench.batches(1, 20), 1)
    assert abs(outcome.loss_gap) > 10 * abs(bench.trial(_plan(Formats.all("bf16"))).loss_gap)


def test_fp32_is_as_fast_as_itself_and_has_no_gap():
    outcome = _bench().trial(FP32)
    assert (outcome.loss_gap, outcome.comparison.speedup.value) == (0.0, 1.0)
    assert not outcome.comparison.is_faster


def test_all_speeds_of_a_confirmation_are_estimates():
    speeds = _bench().speeds({"plan": _plan(FP8), "rival": FP32}, rounds=15)
    assert {type(speed) for speed in speeds.values()} == {EstimatedComparison}


@pytest.mark.parametrize(("target", "name"), [("b200", "mxfp8"), ("b200", "nvfp4"), ("mi300x", "fp8_e4m3fnuz")])
def test_formats_of_other_targets_train_here_too(target, name):
    outcome = _bench(target).trial(_plan(Formats.all(name)))
    assert outcome.state == "complete", outcome.note
    assert outcome.loss_gap != 0


@pytest.mark.usefixtures("planted_clock")
def test_a_step_that_is_slow_here_is_no_reason_to_stop(tiny):
    task = tiny.make(low_s=0.5)
    checkpoint = Checkpoint(weights=task.build_model(0).state_dict(), origin="")
    fields = {"task": task, "checkpoint": checkpoint, "device": CPU, "seed": 0, "budget": 0.5}
    plan = _plan(Formats.all("bf16"))
    assert Bench(**fields).trial(plan).state == "stopped"
    assert Bench(**fields, elsewhere=load_target("h100")).trial(plan).state == "complete"


def test_what_the_targets_kernels_cannot_take_stays_at_16_bit(estimator):
    plan = estimator.as_there(_plan(FP8))
    model = convert(TASK.build_model(0), plan=plan, example_inputs=next(TASK.stream(1))[0])
    rows = {row.site: row for row in receipt(model)}
    assert rows["up"].mechanism == rows["down"].mechanism == "backend:emulated"
    assert (rows["odd"].asked, rows["odd"].got) == ("bf16", "bf16")
    assert rows["::linear#0"].asked == "bf16"
    by_hand = RuleMatcher(_plan(FP8)).rule_for_site("", "linear", 0)
    assert by_hand.formats == FP8  # the given plan asked for more


def test_a_plan_without_narrow_formats_stays_as_it_is(estimator):
    assert estimator.as_there(_plan(Formats.all("bf16"))) == _plan(Formats.all("bf16"))
    assert estimator.as_there(FP32) == FP32


def test_16_bit_takes_less_memory_than_fp32(estimator):
    wide, low = estimator.memory(FP32), estimator.memory(_plan(Formats.all("bf16")))
    assert wide.parts["optimizer"] == low.parts["optimizer"] == 8 * sum(p.numel() for p in Net().parameters())
    assert low.parts["activations"] < wide.parts["activations"]


def test_the_optimizers_real_state_is_counted():
    assert _bench().estimator().optimizer_bytes == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize(("name", "missing"), [("gaudi3", "peak in fp32"), ("ascend-910b", "bandwidth")])
def test_a_target_whose_numbers_are_unknown_cannot_be_priced(name, missing):
    with pytest.raises(TargetError, match=missing):
        refuse_unknown(load_target(name))
    refuse_unknown(load_target("h100"))
