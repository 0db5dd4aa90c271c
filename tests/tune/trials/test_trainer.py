import math

import pytest
import torch

from autoprec.errors import TaskError, UsageError
from autoprec.plan import Formats, Plan, PlanRule, ScalerSettings
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.trainer import Trainer, own_random_state, relative_gap, take_batches

CPU = torch.device("cpu")
FP16 = PlanRule(match=("*",), formats=Formats.all("fp16"))


def _losses(task, checkpoint=None, plan=None, **changes):
    trainer = Trainer(task, checkpoint, plan, device=CPU, seed=0, **changes)
    return trainer.losses(take_batches(task, 1, 12, CPU), 1), trainer


def test_runs_from_a_checkpoint_repeat_to_the_last_bit_and_leave_it_alone(tiny):
    task = tiny.make()
    _, trained = _losses(task)
    checkpoint = Checkpoint(
        weights={k: v.clone() for k, v in trained.model.state_dict().items()},
        optimizer=trained.optimizer.state_dict(),
        origin="",
    )
    first, second = (_losses(task, checkpoint)[0] for _ in range(2))
    assert first == second
    assert first != _losses(task)[0]


def test_a_jitter_changes_little(tiny):
    task = tiny.make()
    plain, jittered = _losses(task)[0], _losses(task, jitter=1e-4)[0]
    assert 0 < abs(relative_gap(jittered, plain)) < 1e-3


def test_dropout_is_paired(tiny):
    class Dropped(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(16, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))

    task = tiny.make(build_model=lambda seed: Dropped().requires_grad_(True))
    weights = Dropped().state_dict()
    checkpoint = Checkpoint(weights=weights, origin="")
    assert _losses(task, checkpoint)[0] == _losses(task, checkpoint)[0]


def test_a_checkpoint_of_another_model_is_refused(tiny):
    checkpoint = Checkpoint(weights={"other": torch.ones(1)}, origin="")
    with pytest.raises(TaskError, match="doesn't fit"):
        _losses(tiny.make(), checkpoint)


def test_what_is_no_model_is_refused(tiny):
    with pytest.raises(TaskError, match="returned a int"):
        _losses(tiny.make(build_model=lambda seed: 3))


def test_skipped_steps_are_counted(tiny):
    scaler = ScalerSettings(enabled=True, init_scale=2.0**24, max_scale=2.0**24)
    losses, trainer = _losses(tiny.make(), plan=Plan(rules=(FP16,), scaler=scaler))
    assert trainer.num_skipped > 3
    assert all(map(math.isfinite, losses))
    calm = ScalerSettings(enabled=True, init_scale=64.0)
    assert _losses(tiny.make(), plan=Plan(rules=(FP16,), scaler=calm))[1].num_skipped == 0


def test_inference_trains_nothing(tiny):
    losses, trainer = _losses(tiny.make(mode="inference", optimizer=None))
    assert not trainer.model.training
    assert _losses(tiny.make(mode="inference", optimizer=None))[0] == losses
    assert all(param.grad is None for param in trainer.model.parameters())


@pytest.mark.parametrize(
    ("losses", "reference", "gap"),
    [([1.1, 2.1], [1.0, 2.0], 0.2 / 3), ([1.0], [1.0, 5.0], 0.0), ([-2.0], [-4.0], 0.5), ([1.0], [0.0], 1.0)],
)
def test_the_gap_is_relative_to_the_reference_on_the_same_steps(losses, reference, gap):
    assert relative_gap(losses, reference) == pytest.approx(gap)


def test_where_more_is_better_less_is_a_gap():
    assert relative_gap([0.8, 0.7], [0.9, 0.7], "maximize") == pytest.approx(0.0625)
    assert relative_gap([0.9, 0.8], [0.9, 0.7], "maximize") == pytest.approx(-0.0625)
    assert relative_gap([-2.0], [-1.0], "maximize") == 1.0
    assert math.isnan(relative_gap([math.nan], [1.0], "maximize"))


def test_the_gap_of_a_diverged_run_is_nan_and_of_no_run_an_error():
    assert math.isnan(relative_gap([1.0, math.nan], [1.0, 1.0]))
    assert math.isnan(relative_gap([math.inf], [1.0]))
    with pytest.raises(UsageError):
        relative_gap([], [1.0])


def test_the_callers_random_numbers_stay(tiny):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with own_random_state(CPU):
        _losses(tiny.make())
    assert torch.equal(torch.rand(3), expected)
