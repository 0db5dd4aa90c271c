"""Training steps in low precision: each way a loop goes silently wrong is done right or refused."""

import copy
import logging

import pytest
import torch
from torch import nn

from autoprec.errors import TrainingError, UsageError
from autoprec.plan import ScalerSettings
from autoprec.scaler import BoundedGradScaler
from autoprec.train import Stepper, StepResult


def scaler_of(**fields) -> BoundedGradScaler:
    return BoundedGradScaler(ScalerSettings(enabled=True, **fields), device="cpu")


def zeros(*shape: int) -> nn.Linear:
    layer = nn.Linear(*shape, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=1.0)


SCALERS = pytest.mark.parametrize(
    "make_scaler",
    [
        lambda: None,
        lambda: scaler_of(init_scale=1024.0),
        lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
        lambda: BoundedGradScaler(ScalerSettings(), device="cpu"),
    ],
    ids=["no scaler", "ours", "torch's", "disabled"],
)


@SCALERS
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_training_equals_the_plain_loop(make_scaler, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    batches = torch.randn(20, 16, 4)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in batches:
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused), scaler=make_scaler()) as step:
        for batch in batches:
            assert step(model(batch).square().mean()) == StepResult(stepped=True)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert (step.monitor.steps, step.monitor.skipped) == (20, 0)


# --- clipping sees unscaled gradients, once


@SCALERS
def test_clipping_acts_on_unscaled_gradients(make_scaler):
    model = zeros(4, 1)
    step = Stepper(model, sgd(model), scaler=make_scaler(), max_norm=1.0)
    result = step(model(torch.full((1, 4), 2.0)).sum())
    assert result == StepResult(stepped=True, grad_norm=4.0)
    assert model.weight.norm().item() == pytest.approx(1.0, abs=1e-6)


def test_optimizers_stepped_together_are_clipped_by_their_joint_norm():
    a, b = zeros(1, 1), zeros(1, 1)
    step = Stepper(nn.ModuleList([a, b]), sgd(a), sgd(b), scaler=scaler_of(), max_norm=1.0)
    assert step(a(torch.tensor([[3.0]])).sum() + b(torch.tensor([[4.0]])).sum()).grad_norm == pytest.approx(5.0)
    assert a.weight.item() == pytest.approx(-0.6, abs=1e-5)
    assert b.weight.item() == pytest.approx(-0.8, abs=1e-5)


# --- one unscale, step and update in an accumulation window


@SCALERS
def test_an_accumulated_gradient_is_the_mean_of_the_micro_gradients(make_scaler):
    model = zeros(2, 1)
    step = Stepper(model, sgd(model), scaler=make_scaler(), accumulate=4)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    results = [step(model(row).sum()) for row in x]
    assert results == [None, None, None, StepResult(stepped=True)]
    torch.testing.assert_close(-model.weight.detach()[0], x.mean(0), rtol=1e-6, atol=0.0)
    assert step.monitor.iterations == 1


def test_the_scale_is_constant_inside_a_window_and_grows_after_it():
    model = zeros(2, 1)
    scaler = scaler_of(init_scale=8.0, growth_interval=1)
    step = Stepper(model, sgd(model), scaler=scaler, accumulate=3)
    scales = []
    for _ in range(6):
        scales.append(scaler.get_scale())
        step(model(torch.ones(1, 2)).sum())
    assert scales == [8.0, 8.0, 8.0, 16.0, 16.0, 16.0]


def test_a_scale_that_others_move_inside_a_window_is_refused():
    model = zeros(2, 1)
    scaler = scaler_of(init_scale=1024.0)
    step = Stepper(model, sgd(model), scaler=scaler, accumulate=2)
    step(model(torch.ones(1, 2)).sum())
    scaler.update(4096.0)
    with pytest.raises(TrainingError, match="from 1024 to 4096 between backward and step"):
        step(model(torch.ones(1, 2)).sum())
    assert not model.weight.any()


def test_the_last_incomplete_window_is_a_mean_too():
    model = zeros(1, 1)
    with Stepper(model, sgd(model), scaler=scaler_of(), accumulate=4) as step:
        for value in (1.0, 3.0):
            step(model(torch.tensor([[value]])).sum())
    assert model.weight.item() == pytest.approx(-2.0)


def test_one_bad_micro_batch_skips_the_whole_window():
    model = zeros(1, 1)
    step = Stepper(model, sgd(model), scaler=scaler_of(init_scale=64.0), accumulate=2)
    step(model(torch.tensor([[float("inf")]])).sum())
    assert step(model(torch.tensor([[1.0]])).sum()) == StepResult(stepped=False)
    assert model.weight.item() == 0.0
    assert model.weight.grad is None
    assert step._scaler.get_scale() == 32.0


# --- several optimizers: update once, after all of them


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = zeros(2, 1), zeros(2, 1)


def test_an_overflow_of_one_optimizer_leaves_the_others_update_right():
    gan, x = GAN(), torch.ones(1, 2)
    og, od = sgd(gan.g), sgd(gan.d)
    scaler = scaler_of(init_scale=1024.0)
    step = Stepper(gan, og, od, scaler=scaler)
    step.backward(gan.g(x).sum() * float("inf"))
    assert not step.step(og).stepped
    step.backward(gan.d(x).sum())
    assert step.step(od).stepped
    step.update()
    torch.testing.assert_close(gan.d.weight.detach(), torch.full((1, 2), -1.0))
    assert not gan.g.weight.any()
    assert scaler.get_scale() == 512.0
    assert (step.monitor.steps, step.monitor.skipped) == (0, 1)


def test_update_with_scaled_gradients_outstanding_is_refused():
    gan, x = GAN(), torch.ones(1, 2)
    og, od = sgd(gan.g), sgd(gan.d)
    step = Stepper(gan, og, od, scaler=scaler_of())
    step.backward(gan.g(x).sum())
    step.backward(gan.d(x).sum())
    step.step(og)
    with pytest.raises(TrainingError, match=r"optimizer 1 \(SGD\) still holds scaled gradients"):
        step.update()
    step.step(od)
    step.update()
    torch.testing.assert_close(gan.d.weight.detach(), torch.full((1, 2), -1.0))


def test_gradients_left_by_a_later_loss_do_not_leak_into_the_next_iteration():
    gan, x = GAN(), torch.ones(1, 2)
    og, od = sgd(gan.g), sgd(gan.d)
    step = Stepper(gan, og, od, scaler=scaler_of())
    for _ in range(2):
        step.backward(gan.d(x).sum())
        step.step(od)
        step.backward(gan.g(x).sum() + 100 * gan.d(x).sum())  # the generator's loss goes through the discriminator
        step.step(og)
        step.update()
    torch.testing.assert_close(gan.d.weight.detach(), torch.full((1, 2), -2.0))


def test_the_order_of_calls_is_checked():
    model = zeros(2, 1)
    optimizer = sgd(model)
    step = Stepper(model, optimizer, scaler=scaler_of())
    with pytest.raises(TrainingError, match="without a step"):
        step.update()
    step.backward(model(torch.ones(1, 2)).sum())
    step.step()
    step.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(TrainingError, match="stepped twice"):
        step.step()
    with pytest.raises(UsageError, match="wasn't given to the Stepper"):
        step.step(sgd(model))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TrainingError, match=r"step\(\) without backward"):
        Stepper(model, optimizer).step()


# --- an optimizer and a model that don't belong together


def test_an_optimizer_on_a_copy_of_the_model_is_told_so():
    model = nn.Linear(4, 1)
    step = Stepper(model, sgd(copy.deepcopy(model)), scaler=scaler_of())
    with pytest.raises(TrainingError, match=r"no parameter of this SGD.*None of them belongs to the model: .* copy"):
        step(model(torch.ones(2, 4)).sum())


@SCALERS
def test_a_frozen_part_is_told_so(make_scaler):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    step = Stepper(model, sgd(model[0]), sgd(model[1]), scaler=make_scaler())
    with pytest.raises(TrainingError, match=r"has a gradient \(group 0: 2 parameters\).*frozen must not be stepped"):
        step(model(torch.ones(2, 4)).sum())


def test_a_partly_frozen_optimizer_trains_the_rest():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    assert Stepper(model, sgd(model), scaler=scaler_of())(model(torch.ones(2, 4)).sum()).stepped
    assert torch.equal(model[0].weight, before)


def test_a_loss_that_cannot_be_trained_on_is_refused():
    model = nn.Linear(2, 2)
    step = Stepper(model, sgd(model))
    with pytest.raises(TrainingError, match="depends on no trainable parameter"):
        step(torch.ones(()))
    with pytest.raises(TrainingError, match=r"has shape \(1, 2\)"):
        step(model(torch.ones(1, 2)))


# --- parameters stored in 16 bit


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.slope = nn.Parameter(torch.full((4,), 0.25, dtype=torch.float16))


@SCALERS
def test_fp16_parameters_are_refused_by_name_before_training(make_scaler):
    model = Slope()
    with pytest.raises(TrainingError, match=r"1 trainable parameters are stored in fp16: slope\. .* \(level O1\)"):
        Stepper(model, torch.optim.Adam(model.parameters()), scaler=make_scaler())
    whole = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).half()
    with pytest.raises(TrainingError, match=r"6 trainable .*: 0\.weight, 0\.bias, .* and 1 more"):
        Stepper(whole, sgd(whole))


def test_frozen_fp16_parameters_are_fine():
    model = Slope()
    model.slope.requires_grad_(False)
    assert Stepper(model, sgd(model), scaler=scaler_of())(model.lin(torch.ones(1, 4)).sum()).stepped


def test_rows_without_gradient_stay_as_they_are_under_adam():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    step = Stepper(model, torch.optim.Adam(model.parameters(), lr=1e-3), scaler=scaler_of(init_scale=1024.0))
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.tensor([[0, 1, 2]])).float().pow(2).sum()
    assert step(loss).stepped
    assert torch.equal(model[0].weight[3:], before[3:])
    assert torch.isfinite(model[0].weight).all()
    assert not torch.equal(model[0].weight[:3], before[:3])


def weight_after_200_steps(dtype: torch.dtype) -> float:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model.to(dtype)
    with Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3)) as step:
        for _ in range(200):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(1, 1, dtype=dtype)).sum()
            step(loss)
    return model.weight.item()


def test_small_updates_add_up_in_fp32_parameters_under_bf16_compute(caplog):
    assert weight_after_200_steps(torch.float32) == pytest.approx(0.8, abs=0.05 * 0.2)
    assert not caplog.records


def test_bf16_parameters_lose_small_updates_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="autoprec"):
        assert weight_after_200_steps(torch.bfloat16) == 1.0
    assert "1 trainable parameters are stored in bf16: weight. Without fp32 masters" in caplog.text


# --- checkpoints


def noisy(weight: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient passes through fp16."""
    if weight.requires_grad:
        weight.register_hook(lambda grad: (grad * 100).half().float())
    return weight.sum()


@pytest.mark.parametrize("at", [0, 7])
def test_a_resumed_run_goes_on_to_the_last_bit(at):
    def start() -> tuple[nn.Linear, Stepper]:
        model = zeros(2, 1)
        return model, Stepper(model, sgd(model), scaler=scaler_of(growth_interval=3), accumulate=2)

    def run(model: nn.Linear, step: Stepper, count: int) -> None:
        for _ in range(2 * count):
            step(noisy(model.weight * 1.0))

    whole, whole_step = start()
    run(whole, whole_step, 20)
    first, first_step = start()
    run(first, first_step, at)
    second, second_step = start()
    second.load_state_dict(first.state_dict())
    second_step.load_state_dict(first_step.state_dict())
    run(second, second_step, 20 - at)
    assert torch.equal(second.weight, whole.weight)
    assert second_step.state_dict() == whole_step.state_dict()
    assert whole_step.monitor.skipped > 5


def test_a_state_that_does_not_fit_is_told(caplog):
    model = zeros(2, 1)
    with_scaler, without = Stepper(model, sgd(model), scaler=scaler_of()), Stepper(model, sgd(model))
    with pytest.raises(TrainingError, match="saved with scaling disabled"):
        with_scaler.load_state_dict(without.state_dict())
    with pytest.raises(TrainingError, match="lacks 'scaler' or 'monitor'"):
        without.load_state_dict({})
    without.load_state_dict(with_scaler.state_dict())
    assert "its scale is ignored" in caplog.text
    with_scaler.backward(model(torch.ones(1, 2)).sum())
    Stepper(model, sgd(model), scaler=scaler_of()).load_state_dict(with_scaler.state_dict())
    assert "the gradients of 1 passes are lost" in caplog.text


def test_bad_arguments_are_named():
    model = zeros(2, 1)
    optimizer = sgd(model)
    with pytest.raises(UsageError, match="give the optimizers"):
        Stepper(model)
    with pytest.raises(UsageError, match="each once"):
        Stepper(model, optimizer, optimizer)
    with pytest.raises(UsageError, match="accumulate=0"):
        Stepper(model, optimizer, accumulate=0)
    with pytest.raises(UsageError, match="max_norm=0"):
        Stepper(model, optimizer, max_norm=0)
