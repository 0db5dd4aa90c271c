"""A norm and the linear layer that alone reads it in the real te.LayerNormLinear: when, in which numbers, when not."""

import copy
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec
from autoprec.backends import LinearSpec, get_backend
from autoprec.backends.base import FirstHalf, Norm
from autoprec.backends.transformer_engine.backend import TransformerEngineBackend
from autoprec.errors import ConversionError
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.recipes import CurrentRecipe

pytestmark = pytest.mark.te

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
ROWS, WIDTH = 24, 32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the kernel


@pytest.mark.parametrize("rows", [ROWS, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_numbers_are_those_of_the_norm_and_emulation(
    hopper: ModuleType, kind: Any, with_bias: bool, dtype: torch.dtype, rows: int
) -> None:
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    results = []
    for fused in (True, False):
        x = draw(rows, WIDTH).to(dtype)
        leaf = (hopper.on_gpu(x) if fused else x).requires_grad_()
        scale, weight = nn.Parameter(1 + 0.1 * draw(WIDTH, seed=1)), nn.Parameter(draw(48, WIDTH, seed=2))
        shift = nn.Parameter(draw(WIDTH, seed=3)) if with_bias and kind == "LayerNorm" else None
        bias = nn.Parameter(draw(48, seed=4)) if with_bias else None
        if fused:
            norm = Norm(kind=kind, eps=1e-3, weight=scale, bias=shift)
            output = TransformerEngineBackend().norm_linear(leaf, norm, weight, bias, spec)
        else:
            rounded = [None if t is None else t.to(dtype) for t in (scale, shift)]  # as the kernel reads them
            if kind == "RMSNorm":
                normed = F.rms_norm(leaf, (WIDTH,), rounded[0], 1e-3)
            else:
                normed = F.layer_norm(leaf, (WIDTH,), *rounded, 1e-3)
            output = get_backend("emulated").linear(normed, weight, bias, spec)
        output.backward(draw(rows, 48, seed=5).to(dtype))
        leaves = [t for t in (leaf, scale, shift, weight, bias) if t is not None]
        results.append([t.detach().as_subclass(Tensor).float() for t in (output, *(t.grad for t in leaves))])
        assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves]  # type: ignore[union-attr]
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-4
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_perceptrons_numbers_are_those_of_its_parts(
    hopper: ModuleType, kind: Any, activation: Any, biases: tuple[bool, bool]
) -> None:
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    act = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": torch.relu, "silu": F.silu}[activation]
    results = []
    for fused in (True, False):
        x = draw(33, WIDTH).bfloat16()
        leaf = (hopper.on_gpu(x) if fused else x).requires_grad_()
        scale, first, second = (nn.Parameter(draw(*s, seed=i)) for i, s in enumerate(((WIDTH,), (48, WIDTH), (16, 48))))
        bias = [nn.Parameter(draw(n, seed=9)) if on else None for on, n in zip(biases, (48, 16), strict=True)]
        if fused:
            half = FirstHalf(
                norm=Norm(kind=kind, eps=1e-3, weight=scale), weight=first, bias=bias[0], activation=activation
            )
            output = TransformerEngineBackend().mlp(leaf, half, second, bias[1], spec)
        else:
            norm = F.rms_norm if kind == "RMSNorm" else F.layer_norm
            named = {"weight": scale.bfloat16(), "eps": 1e-3}
            linear = get_backend("emulated").linear
            hidden = linear(norm(leaf, (WIDTH,), **named), first, bias[0], spec)
            output = linear(act(hidden), second, bias[1], spec)
        output.backward(draw(33, 16, seed=5).bfloat16())
        leaves = [t for t in (leaf, scale, first, second, *bias) if t is not None]
        results.append([t.detach().as_subclass(Tensor).float() for t in (output, *(t.grad for t in leaves))])
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).norm() < 0.03 * wanted.norm()


def test_a_layer_holds_nothing_of_the_model(hopper: ModuleType) -> None:
    backend, spec = TransformerEngineBackend(), LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    norm = Norm(kind="LayerNorm", eps=1e-5, weight=nn.Parameter(torch.ones(WIDTH)), bias=None)
    half = FirstHalf(norm=norm, weight=nn.Parameter(draw(48, WIDTH)), bias=None, activation="relu")
    x = hopper.on_gpu(draw(ROWS, WIDTH).bfloat16())
    backend.norm_linear(x, norm, nn.Parameter(draw(48, WIDTH)), None, spec)
    backend.mlp(x, half, nn.Parameter(draw(16, 48)), None, spec)
    for layer in (*backend._norm_layers.values(), *backend._mlp_layers.values()):
        assert all(value is None for value in layer._linear._parameters.values())
    assert (len(backend._norm_layers), len(backend._mlp_layers)) == (1, 1)
    backend.reset()
    assert not backend._norm_layers
    assert not backend._mlp_layers


def test_an_rms_norm_that_needs_no_gradient(hopper: ModuleType) -> None:
    # Transformer Engine's own layer fails there.
    norm = Norm(kind="RMSNorm", eps=1e-5, weight=torch.ones(WIDTH))
    half = FirstHalf(norm=norm, weight=nn.Parameter(draw(48, WIDTH)), bias=None, activation="relu")
    x = hopper.on_gpu(draw(ROWS, WIDTH).bfloat16())
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    TransformerEngineBackend().mlp(x, half, draw(16, 48), None, spec).sum().backward()
    assert half.weight.grad is not None
    assert x.grad is None


def test_an_environment_variable_does_not_fuse_the_gelu(hopper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GEMM_GELU_FUSION", "1")  # read where a layer is made; the product would round otherwise
    monkeypatch.setattr("transformer_engine.pytorch.module.layernorm_mlp._ub_communicators", {})
    norm = Norm(kind="RMSNorm", eps=1e-5, weight=torch.ones(WIDTH))
    half = FirstHalf(norm=norm, weight=draw(48, WIDTH), bias=None, activation="gelu_tanh")
    x = hopper.on_gpu(draw(ROWS, WIDTH).bfloat16())
    hopper.CALLS.clear()
    TransformerEngineBackend().mlp(x, half, draw(16, 48), None, LinearSpec(formats=HYBRID, recipe=CurrentRecipe()))
    assert ("activation", "gelu") in hopper.CALLS


# --- in a converted model


class Block(nn.Module):
    """Two norms, each read by one layer, and one read by two."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, act: Any = F.gelu, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act = act
        self.before = nn.Linear(WIDTH, WIDTH)
        self.norm, self.up = norm(WIDTH, **options), nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)
        self.shared, self.left, self.right = norm(WIDTH, **options), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.act(self.up(self.norm(self.before(x)))))
        h = self.shared(x)
        return torch.cat([self.left(h), self.right(h)], -1)


def plan(recipe: str = "current", norms: str = "fp32") -> Plan:
    return Plan(
        rules=(
            PlanRule(match=("*::linear",), formats=HYBRID, backend=("transformer_engine",)),
            PlanRule(match=("*::layer_norm", "*::rms_norm"), formats=Formats.all(norms)),
            PlanRule(match=("*",), formats=Formats.all("bf16")),
        ),
        recipe={"fp8": {"recipe": recipe}},
    )


def converted(model: nn.Module, **options: Any) -> Any:
    """Converted where no device is known yet, on inputs without numbers, then filled."""
    state = model.state_dict()
    example = torch.empty(ROWS, WIDTH, device="meta")
    made = autoprec.convert(model.to("meta"), plan=plan(**options), example_inputs=example).to_empty(device="cpu")
    made.load_state_dict(state)
    return made


def tokens(hopper: ModuleType, rows: int = ROWS) -> Tensor:
    return hopper.on_gpu(draw(rows, WIDTH))


def norms(hopper: ModuleType) -> int:
    """Norms that Transformer Engine ran since the last call."""
    count = [kind for kind, _ in hopper.CALLS].count("norm")
    hopper.CALLS.clear()
    return count


@pytest.mark.parametrize(("norm", "op"), [(nn.LayerNorm, "layer_norm"), (nn.RMSNorm, "rms_norm")])
def test_a_norm_that_one_layer_reads_is_fused_and_the_receipt_says_so(
    hopper: ModuleType, norm: type[nn.Module], op: str
) -> None:
    model = converted(Block(norm))
    receipt = autoprec.receipt(model)
    assert receipt["norm"].mechanism == receipt["up"].mechanism == "backend:transformer_engine"
    assert receipt["norm"].why.startswith("te fused: runs in the product of 'up', which")
    assert receipt["up"].why.endswith("te fused: with norm 'norm'")
    assert receipt["shared"].mechanism == "frame"
    for layer in ("left", "right"):
        assert receipt[layer].why.endswith("norm 'shared' isn't fused: 2 calls read its result: left, right")
    norms(hopper)
    model(tokens(hopper)).sum().backward()
    assert norms(hopper) == 1


ACTIVATIONS: dict[str, Any] = {
    "relu": torch.relu,
    "silu": F.silu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "nn.ReLU": nn.ReLU(),
    "nn.GELU tanh": nn.GELU("tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_perceptron_is_fused_whole(hopper: ModuleType, name: str) -> None:
    model = converted(Block(act=ACTIVATIONS[name]))
    receipt = autoprec.receipt(model)
    assert receipt["norm"].why.startswith("te fused: runs in the product of 'up' and 'down', which")
    assert receipt["up"].why.endswith("te fused: with norm 'norm' and layer 'down'")
    assert receipt["down"].why.endswith("te fused: with norm 'norm' and layer 'up'")
    norms(hopper)
    model(tokens(hopper)).sum().backward()
    assert [kind for kind, _ in hopper.CALLS].count("activation") == 1
    assert norms(hopper) == 1


@pytest.mark.parametrize(
    "act",
    [F.gelu, torch.tanh, lambda x: F.dropout(torch.relu(x), 0.1), nn.GELU()],
    ids=["exact gelu", "tanh", "dropout", "nn.GELU"],
)
def test_another_activation_leaves_the_second_layer_alone(hopper: ModuleType, act: Any) -> None:
    model = converted(Block(act=act))
    assert autoprec.receipt(model)["norm"].why.startswith("te fused: runs in the product of 'up', which")
    assert "fused" not in autoprec.receipt(model)["down"].why
    norms(hopper)
    model(tokens(hopper)).sum().backward()
    assert "activation" not in [kind for kind, _ in hopper.CALLS]
    assert norms(hopper) == 1


@pytest.mark.parametrize("act", [F.gelu, torch.relu], ids=["norm and layer", "perceptron"])
def test_training_goes_as_without_fusing_and_keys_and_parameters_stay(hopper: ModuleType, act: Any) -> None:
    traces = []
    for fused in (True, False):
        model = converted(Block(bias=True, act=act))
        assert list(model.state_dict()) == list(Block().state_dict())
        if not fused:
            model = autoprec.convert(autoprec.revert(model).to("meta"), plan=plan()).to_empty(device="cpu")
            model.load_state_dict(Block().state_dict())
        parameters, losses = dict(model.named_parameters()), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(tokens(hopper)).square().mean()
            loss.backward()
            assert norms(hopper) == fused
            assert all(p.grad is not None for p in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert not any("transformer_engine" in type(m).__module__ for m in model.modules())
        traces.append(losses)
    assert traces[0] == pytest.approx(traces[1], rel=0.02)
    assert traces[0][-1] < traces[0][0]


def test_copies_pickles_and_reverting(hopper: ModuleType) -> None:
    model = converted(Block())
    output = model(tokens(hopper)).detach()
    norms(hopper)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(tokens(hopper)).detach(), output)
        assert norms(hopper) == 1
    autoprec.revert(model)(draw(ROWS, WIDTH))
    assert norms(hopper) == 0


def test_without_example_inputs_nothing_is_fused(hopper: ModuleType) -> None:
    model = autoprec.convert(Block().to("meta"), plan=plan())
    assert not any("fused" in row.why for row in autoprec.receipt(model))


def test_what_else_keeps_them_apart(hopper: ModuleType) -> None:
    hooked = Block()
    hooked.norm.register_forward_hook(lambda module, args, out: None)
    cases = {
        "one of the two has hooks": converted(hooked),
        "recipe 'delayed' starts from the norm's result": converted(Block(), recipe="delayed"),
        "it has no weight": converted(Block(elementwise_affine=False)),
        "no rule of the plan says what it runs in": converted(Block(), norms="follow"),
    }
    for reason, model in cases.items():
        assert f"norm 'norm' isn't fused: {reason}" in autoprec.receipt(model)["up"].why
        model(tokens(hopper)).sum().backward()
        assert norms(hopper) == 0


# --- when the model doesn't do what it did


class Perceptron(nn.Module):
    """What happens between its halves is for a test to say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, 16)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(self.before(x)))
        if self.between is not None:
            h = self.between(h)
        return self.down(torch.relu(h))


def test_a_change_between_the_halves_is_followed(hopper: ModuleType) -> None:
    grads: list[list[Tensor]] = []
    for fused in (True, False):
        model = converted(Perceptron())
        if not fused:
            model = autoprec.convert(autoprec.revert(model).to("meta"), plan=plan()).to_empty(device="cpu")
            model.load_state_dict(Perceptron().state_dict())
        model.between = lambda h: h * 2 + 1
        out = model(tokens(hopper))
        out.sum().backward()
        assert norms(hopper) == fused
        grads.append([out.detach().as_subclass(Tensor), *(p.grad for p in model.parameters())])
    for got, wanted in zip(*grads, strict=True):
        assert (got - wanted).norm() <= 0.05 * wanted.norm()


def test_a_first_weight_written_in_between_is_an_error(hopper: ModuleType) -> None:
    model = converted(Perceptron())

    def write(h: Tensor) -> Tensor:
        with torch.no_grad():
            model.up.weight.add_(1)
        return h

    model.between = write
    with pytest.raises(ConversionError, match="written before its result was read"):
        model(tokens(hopper))


class Changeable(nn.Module):
    """What happens between norm and layer is for a test to say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        h = self.norm(x)
        seen = None if self.between is None else self.between(x, h)
        out = self.up(h)
        return out if seen is None else out + seen.sum()


def test_another_reader_gets_the_numbers(hopper: ModuleType) -> None:
    model, plain = converted(Changeable()), Changeable()
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.copy_(parameter)
    seen: list[Tensor] = []
    model.between = lambda x, h: seen.append(h.clone())
    model(tokens(hopper))
    assert norms(hopper) == 1
    torch.testing.assert_close(seen[0].as_subclass(Tensor), plain.norm(draw(ROWS, WIDTH)))
    assert type(seen[0]) is not type(model.norm(tokens(hopper)))
    # With its gradient, which then has two ways back.
    grads = []
    for net, x in ((model, tokens(hopper)), (plain, draw(ROWS, WIDTH))):
        net.between = lambda x, h: h * 2
        x.requires_grad_()
        net(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad.as_subclass(Tensor))
    torch.testing.assert_close(*grads, rtol=0.1, atol=0.1 * grads[1].abs().max().item())


def test_shape_and_dtype_need_no_numbers(hopper: ModuleType) -> None:
    model = converted(Changeable())
    answers: list[Any] = []
    model.between = lambda x, h: answers.append((h.shape, h.dtype, h.dim(), h.size(-1), len(h), h.is_floating_point()))
    model(tokens(hopper))
    assert answers == [((ROWS, WIDTH), torch.float32, 2, WIDTH, ROWS, True)]


@pytest.mark.parametrize("what", ["input", "weight"])
def test_a_write_in_between_is_an_error_and_not_another_number(hopper: ModuleType, what: str) -> None:
    model = converted(Changeable())

    def write(x: Tensor, h: Tensor) -> None:
        with torch.no_grad():
            (x if what == "input" else model.norm.weight).add_(1)

    model.between = write
    with pytest.raises(ConversionError, match="written before its result was read"):
        model(tokens(hopper))


def test_a_read_that_would_lose_the_gradient_is_an_error(hopper: ModuleType) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return grad * 2

    model = converted(Changeable())
    model.between = lambda x, h: Double.apply(h)
    with pytest.raises(ConversionError, match="read where no gradient is recorded"):
        model(tokens(hopper).requires_grad_())


def test_evaluation_and_empty_inputs(hopper: ModuleType) -> None:
    model = converted(Changeable()).eval()
    with torch.no_grad():
        assert model(tokens(hopper)).shape == (ROWS, 48)
        assert norms(hopper) == 1
        assert model(tokens(hopper, 0)).shape == (0, 48)
    with torch.inference_mode():
        assert model(tokens(hopper)).shape == (ROWS, 48)
