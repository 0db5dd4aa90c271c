"""Parameters stored in fp16 train under a loss scaler, on their fp32 masters."""

import copy
import pickle

import pytest
import torch
from torch import nn

import autoprec
from autoprec.masters import master_of
from autoprec.plan import ScalerSettings
from autoprec.scaler import BoundedGradScaler
from autoprec.train import Stepper

SETTINGS = ScalerSettings(enabled=True, init_scale=2.0**12)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def stored_in_fp16():
    return autoprec.convert(make_model(), target="v100", level="O2")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(count=30):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 8, generator=generator) for _ in range(count)]


def loss_of(model, x, factor=1.0):
    return factor * (model(x).float() - x[:, :1].sin()).square().mean()


def train_by_hand(model, factor=1.0):
    optimizer, scaler, losses = sgd(model), BoundedGradScaler(SETTINGS, device="cpu"), []
    for x in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, factor)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def train_in_fp32():
    model = make_model()
    optimizer, losses = sgd(model), []
    for x in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_stored_in_fp16(model):
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    for parameter in model.parameters():
        assert torch.equal(master_of(parameter).value.half(), parameter)


def test_trains_like_fp32():
    model = stored_in_fp16()
    losses = train_by_hand(model)
    assert_stored_in_fp16(model)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train_in_fp32()), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, BoundedGradScaler])
def test_stepper_trains_it_with_either_scaler(make_scaler):
    model = stored_in_fp16()
    scaler = BoundedGradScaler(SETTINGS, device="cpu")
    if make_scaler is torch.amp.GradScaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    with Stepper(model, sgd(model), scaler=scaler, max_norm=10.0) as step:
        for x in batches():
            loss = loss_of(model, x)
            step(loss)
            losses.append(loss.item())
            assert_stored_in_fp16(model)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train_in_fp32()), rtol=2e-2, atol=1e-3)


def test_gradients_below_fp16_survive_being_unscaled():
    model = stored_in_fp16()
    optimizer, scaler = sgd(model), BoundedGradScaler(SETTINGS, device="cpu")
    scaler.scale(loss_of(model, batches(1)[0], 1e-7)).backward()
    scaler.unscale_(optimizer)
    gradient = model[0].weight.grad
    assert gradient.dtype == torch.float32
    # most of these are 0 in fp16, whose smallest number is 6e-8
    assert (gradient != 0).float().mean() > 0.9
    assert gradient.abs().max() < 1e-7
    scaler.step(optimizer)
    assert_stored_in_fp16(model)


def test_an_overflow_skips_the_step_and_leaves_the_values():
    model = stored_in_fp16()
    before = copy.deepcopy(model.state_dict())
    optimizer, scaler = sgd(model), BoundedGradScaler(SETTINGS, device="cpu")
    scaler.scale(loss_of(model, batches(1)[0], 1e6)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert_stored_in_fp16(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_unscaled_step_that_is_left_out_ends_in_16_bit():
    model = stored_in_fp16()
    optimizer, scaler = sgd(model), BoundedGradScaler(SETTINGS, device="cpu")
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    assert_stored_in_fp16(model)


def test_a_copy_trains_on_masters_of_its_own():
    model = stored_in_fp16()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    before = copy.deepcopy(model.state_dict())
    train_by_hand(copied)
    assert_stored_in_fp16(copied)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
