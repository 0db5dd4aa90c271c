"""A converted model whose linear layers run in Transformer Engine."""

import copy
import gc
import pickle
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import autoprec
from autoprec.plan import Formats, Plan, PlanRule

pytestmark = pytest.mark.te

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")


class Net(nn.Module):
    """Two linear layers that do the same, so that they share a frame, and a head that FP8 can't take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


def plan(recipe: str) -> Plan:
    return Plan(
        rules=(
            PlanRule(match=("*::linear",), formats=HYBRID, backend=("transformer_engine",)),
            PlanRule(match=("*",), formats=Formats.all("bf16")),
        ),
        recipe={"fp8": {"recipe": recipe}},
    )


def converted(recipe: str) -> Net:
    """Converted where no device is known yet, then filled."""
    torch.manual_seed(0)
    filled = Net()
    with torch.device("meta"):
        model = Net()
    example = torch.empty(8, 32, device="meta")
    model = autoprec.convert(model, plan=plan(recipe), example_inputs=example).to_empty(device="cpu")
    model.load_state_dict(filled.state_dict())
    return model


def tokens(hopper: ModuleType) -> Tensor:
    return hopper.on_gpu(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))


def quantized(hopper: ModuleType) -> int:
    count = [kind for kind, _ in hopper.CALLS].count("quantize")
    hopper.CALLS.clear()
    return count


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_sites_call_transformer_engine_and_the_rest_says_why(hopper: ModuleType, recipe: str) -> None:
    model = converted(recipe)
    parameters, keys = dict(model.named_parameters()), list(Net().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens(hopper)).square().mean()
        loss.backward()
        assert quantized(hopper) == 6  # input, weight and gradient of two layers
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert list(model.state_dict()) == keys
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert {type(m) for m in model.modules()} != {nn.Linear}  # frames, and no module of Transformer Engine's
    assert not any("transformer_engine" in type(m).__module__ for m in model.modules())
    rows = {row.site.partition("::")[0]: row for row in autoprec.receipt(model).rows}
    assert rows["first"].mechanism == rows["second"].mechanism == "backend:transformer_engine"
    assert f"Transformer Engine, recipe {recipe!r}" in rows["first"].why
    assert rows["head"].got == "bf16"
    assert "out_features=10 isn't a multiple of 16" in rows["head"].why


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_copies_pickles_and_checkpoints(hopper: ModuleType, recipe: str) -> None:
    model = converted(recipe)
    output = model(tokens(hopper)).detach()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        quantized(hopper)
        torch.testing.assert_close(other(tokens(hopper)).detach(), output)
        assert quantized(hopper) == 4
    plain = Net()
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)


def test_an_old_models_layers_go_with_it(hopper: ModuleType) -> None:
    from autoprec.backends import get_backend

    model = converted("delayed")
    model(tokens(hopper)).sum().backward()
    backend = get_backend("transformer_engine")
    before = len(backend._of_weights)  # type: ignore[attr-defined]
    assert before
    del model
    gc.collect()
    assert len(backend._of_weights) == before - 2  # type: ignore[attr-defined]


def test_reverting_leaves_plain_layers(hopper: ModuleType) -> None:
    model = converted("current")
    autoprec.revert(model)
    quantized(hopper)
    model(torch.randn(8, 32)).sum().backward()
    assert quantized(hopper) == 0
    assert type(model.first) is nn.Linear


def test_a_receipt_amid_training_teaches_delayed_scales_nothing(hopper: ModuleType) -> None:
    losses = []
    for shown in (False, True):
        model = converted("delayed")
        for i in range(4):
            if shown and i == 2:
                autoprec.receipt(model, hopper.on_gpu(tokens(hopper) * 64))
            loss = model(tokens(hopper) * (i + 1)).square().mean()
            loss.backward()
            losses.append(loss.item())
    assert losses[:4] == losses[4:]


def test_reverting_forgets_what_delayed_scales_learned(hopper: ModuleType) -> None:
    model = converted("delayed")
    before = model(tokens(hopper)).detach()
    for _ in range(2):
        model(tokens(hopper) * 64).sum().backward()
    assert not torch.equal(model(tokens(hopper)).detach(), before)
    backend = autoprec.backends.get_backend("transformer_engine")  # type: ignore[attr-defined]
    weights = dict(model.named_parameters())
    assert any(weights[name] in backend._of_weights for name in ("first.weight", "second.weight"))
    autoprec.revert(model)
    assert not any(weights[name] in backend._of_weights for name in ("first.weight", "second.weight"))
