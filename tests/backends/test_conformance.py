"""What every backend promises, run by each that is available: numerics, gradients, compilation, copies, refusals."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec.backends import LinearSpec, choose, get_backend, list_backends
from autoprec.formats import FORMATS, round_to
from autoprec.plan import Formats
from autoprec.recipes import (
    Block128Recipe,
    CurrentRecipe,
    DelayedRecipe,
    MXFP8Recipe,
    NVFP4Recipe,
    Recipe,
    RowwiseRecipe,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # inductor's own import
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo's own way
]

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
E4M3 = Formats.all("fp8_e4m3")
ROWS, OUT, IN = 33, 48, 80  # rows are no multiple of 16: backward has to cope


@dataclass(frozen=True)
class Case:
    """Formats and a recipe, with the rounding of one operand ``[rows, K]`` written out once more."""

    formats: Formats
    recipe: Recipe | None
    rounded: Callable[[Tensor, str], Tensor]


def per_tensor(x: Tensor, name: str) -> Tensor:
    scale = torch.tensor(FORMATS[name].max) / x.float().abs().max()
    scaled = x.float() * scale
    return (scaled.round() if name == "int8" else round_to(scaled, name)).double() / scale.double()


def per_row(x: Tensor, name: str) -> Tensor:
    scale = FORMATS[name].max / x.double().abs().amax(1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(scale))).float()
    return round_to(x.float() * scale, name).double() / scale.double()


def plain(x: Tensor, name: str) -> Tensor:
    return round_to(x.float(), name).double()


CASES = {
    "current": Case(HYBRID, CurrentRecipe(), per_tensor),
    "current-e4m3": Case(E4M3, CurrentRecipe(), per_tensor),
    "rowwise": Case(E4M3, RowwiseRecipe(), per_row),
    "mxfp8": Case(Formats.all("mxfp8"), MXFP8Recipe(), plain),
    "nvfp4": Case(Formats.all("nvfp4"), NVFP4Recipe(weight_2d=False, hadamard=False, stochastic_rounding=False), plain),
    "unscaled": Case(HYBRID, None, plain),
    "bf16": Case(Formats.all("bf16"), None, plain),
    "int8": Case(Formats.all("int8"), CurrentRecipe(), per_tensor),
}


def operands(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias and grad_output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, ROWS // 3, IN, generator=generator).to(dtype)
    weight = torch.randn(OUT, IN, generator=generator) / IN**0.5
    bias = torch.randn(OUT, generator=generator)
    grad = (torch.randn(3, ROWS // 3, OUT, generator=generator) * 1e-3).to(dtype)
    return x.to(device), weight.to(device), bias.to(device), grad.to(device)


def supported(backend: str, case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LinearSpec:
    """The case's spec, or a skip with the backend's own reason."""
    x, weight, _, _ = operands(dtype, device)
    chosen, reason = choose("linear", case.formats, x, weight, (backend,), "training", recipe=case.recipe)
    if chosen is None:
        pytest.skip(reason)
    return LinearSpec(formats=case.formats, recipe=case.recipe)


def run(function: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Output and the gradients of all arguments."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    output = function(*leaves, *([None] if bias is None else []))
    output.backward(grad.to(output.dtype))
    return [output.detach(), *(t.grad for t in leaves if t.grad is not None)]


def assert_product(got: Tensor, a: Tensor, b: Tensor) -> None:
    """``got`` is ``a @ b.T`` but for accumulation and rounding to its own dtype."""
    wanted = a @ b.T
    # FP8 tensor cores accumulate in fewer bits; benchmarks/emulation.py finds up to 2 ** -11.4 for an H100.
    share = (a.shape[1] + 4) * 2.0**-24 if got.device.type == "cpu" else 2.0**-10
    accumulated = share * (a.abs() @ b.abs().T)
    assert ((got.double() - wanted).abs() <= accumulated + wanted.abs() * torch.finfo(got.dtype).eps).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("backend", list_backends())
def test_each_product_has_exactly_rounded_operands(backend: str, case: Case, dtype: torch.dtype, device: str) -> None:
    spec = supported(backend, case, dtype, device)
    x, weight, _, grad = operands(dtype, device)
    output, grad_input, grad_weight = run(lambda *a: get_backend(backend).linear(*a, spec), x, weight, None, grad)
    rows, grad_rows, q, f = x.reshape(-1, IN), grad.reshape(-1, OUT), case.rounded, case.formats
    assert_product(output.reshape(-1, OUT), q(rows, f.input), q(weight, f.weight))
    assert_product(grad_input.reshape(-1, IN), q(grad_rows, f.grad_output), q(weight.T, f.weight))
    # These give this gradient in the activation's dtype.
    stored = grad_weight.to(dtype) if backend in ("torchao", "transformer_engine") else grad_weight
    assert_product(stored, q(grad_rows.T, f.grad_output), q(rows.T, f.input))
    assert (output.dtype, grad_input.dtype, grad_weight.dtype) == (dtype, dtype, torch.float32)


@pytest.mark.parametrize("backend", list_backends())
def test_bias_and_its_gradient_stay_in_high_precision(backend: str) -> None:
    spec = supported(backend, CASES["current"])
    x, weight, bias, grad = operands()
    backend_linear = get_backend(backend).linear
    with_bias = run(lambda *a: backend_linear(*a, spec), x, weight, bias, grad)
    without = run(lambda *a: backend_linear(*a, spec), x, weight, None, grad)
    assert torch.equal(with_bias[0], without[0] + bias)
    torch.testing.assert_close(with_bias[3], grad.reshape(-1, OUT).sum(0), rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(with_bias[1:3], without[1:], strict=True))


@pytest.mark.parametrize("backend", list_backends())
@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 3, 5, IN)])
def test_any_number_of_leading_dimensions(backend: str, shape: tuple[int, ...]) -> None:
    spec = supported(backend, CASES["current"])
    _, weight, bias, _ = operands()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    grad = torch.ones(*shape[:-1], OUT)
    output, grad_input, *_ = run(lambda *a: get_backend(backend).linear(*a, spec), x, weight, bias, grad)
    assert output.shape == (*shape[:-1], OUT)
    assert grad_input.shape == shape
    torch.testing.assert_close(output, F.linear(x, weight, bias), rtol=0.1, atol=0.3)


@pytest.mark.parametrize("backend", list_backends())
@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_asked_for(backend: str, trained: tuple[bool, bool, bool]) -> None:
    spec = supported(backend, CASES["current"])
    tensors = [t.clone().requires_grad_(on) for t, on in zip(operands(), trained, strict=False)]
    get_backend(backend).linear(*tensors, spec).sum().backward()
    assert [t.grad is not None for t in tensors] == list(trained)


@pytest.mark.parametrize(
    ("backend", "case", "compiler"),
    [
        ("emulated", "current", "eager"),
        *((backend, "current", "aot_eager") for backend in list_backends()),
        *((backend, "current", "inductor") for backend in ("emulated", "native")),
        pytest.param("torchao", "current", "inductor", marks=pytest.mark.slow),
        *(("emulated", case, "aot_eager") for case in ("rowwise", "mxfp8", "nvfp4")),
        *(pytest.param("emulated", case, "inductor", marks=pytest.mark.slow) for case in ("rowwise", "mxfp8", "nvfp4")),
    ],
)
def test_compiles_in_one_graph_to_the_same_bits(backend: str, case: str, compiler: str) -> None:
    spec = supported(backend, CASES[case], torch.bfloat16)
    torch._dynamo.reset()

    kernel = get_backend(backend)

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return kernel.linear(x, weight, bias, spec)

    eager = run(linear, *operands(torch.bfloat16))
    with inductor_config.patch(emulate_precision_casts=True):
        compiled = run(torch.compile(linear, fullgraph=True, backend=compiler), *operands(torch.bfloat16))
    for name, a, b in zip(("output", "grad_input", "grad_weight"), eager, compiled, strict=False):
        assert torch.equal(a, b), name


class Layer(nn.Module):
    """A module whose forward calls a backend with its own Parameters, as a converted one does."""

    def __init__(self, backend: str, spec: LinearSpec) -> None:
        super().__init__()
        _, weight, bias, _ = operands()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.backend, self.spec = get_backend(backend), spec

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.weight, self.bias, self.spec)


@pytest.mark.parametrize("backend", list_backends())
def test_a_module_that_uses_it_copies_pickles_and_keeps_its_keys(backend: str) -> None:
    layer = Layer(backend, supported(backend, CASES["current"]))
    x = operands()[0]
    output = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), output)
        assert list(other.state_dict()) == ["weight", "bias"]
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), output)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", list_backends())
def test_recomputation_changes_nothing(backend: str, reentrant: bool) -> None:
    layer = Layer(backend, supported(backend, CASES["current"]))
    x, _, _, grad = operands()
    gradients = []
    for function in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        function(leaf).backward(grad)
        gradients.append([leaf.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", list_backends())
def test_an_outer_autocast_changes_nothing(backend: str) -> None:
    spec = supported(backend, CASES["current"])
    tensors = operands()

    def in_autocast(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return get_backend(backend).linear(*args, spec)

    outside = run(lambda *a: get_backend(backend).linear(*a, spec), *tensors)
    inside = run(in_autocast, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


@pytest.mark.parametrize("backend", list_backends())
def test_output_dtype_is_as_told(backend: str) -> None:
    spec = supported(backend, CASES["current"], torch.bfloat16)
    x, weight, bias, _ = operands(torch.bfloat16)
    told = LinearSpec(formats=spec.formats, recipe=spec.recipe, output_dtype=torch.float32)
    assert get_backend(backend).linear(x, weight, bias, told).dtype == torch.float32


@pytest.mark.parametrize("backend", list_backends())
def test_small_gradients_survive_and_zeros_stay_zeros(backend: str) -> None:
    spec = supported(backend, CASES["current"])
    x, weight, _, grad = operands()
    linear = get_backend(backend).linear
    tiny = run(lambda *a: linear(*a, spec), x, weight, None, grad * 1e-9)
    usual = run(lambda *a: linear(*a, spec), x, weight, None, grad)
    torch.testing.assert_close(tiny[1] * 1e9, usual[1], rtol=0.2, atol=usual[1].abs().max().item() * 0.1)
    zeros = run(lambda *a: linear(*a, spec), x * 0, weight, None, grad * 0)
    assert all(not t.any() for t in zeros)


@dataclass(frozen=True)
class Refusal:
    """What is asked, and a part of the answer of each backend that refuses it."""

    answers: dict[str, str]
    op: str = "linear"
    formats: Formats = HYBRID
    recipe: Recipe | None = CASES["current"].recipe
    x: tuple[int, ...] = (32, 64)
    weight: tuple[int, ...] = (48, 64)
    dtype: torch.dtype = torch.float32


EVERY = ("emulated", "native", "torchao")
REFUSALS = [
    Refusal(dict.fromkeys(EVERY, "op 'conv2d' has no scaled kernel"), op="conv2d"),
    Refusal(dict.fromkeys(EVERY, "input (32, 60) and weight (48, 64) don't fit"), x=(32, 60)),
    Refusal(dict.fromkeys(EVERY, "needs an input [..., K] and a weight [N, K]"), weight=(2, 48, 64)),
    Refusal(dict.fromkeys(EVERY, "takes fp32, fp16 or bf16 activations, not float64"), dtype=torch.float64),
    Refusal(
        {"native": "in_features=72 isn't a multiple of 16", "torchao": "in_features=72"}, x=(4, 72), weight=(48, 72)
    ),
    Refusal({"native": "out_features=10 isn't a multiple of 16", "torchao": "out_features=10"}, weight=(10, 64)),
    Refusal({"native": "the input is empty", "torchao": "the input is empty"}, x=(0, 64)),
    Refusal({"native": "takes FP8 in every role, not bf16"}, formats=Formats.all("bf16")),
    Refusal({"native": "no kernel multiplies e5m2 by e5m2, as output would"}, formats=Formats.all("fp8_e5m2")),
    Refusal(
        {"native": "e5m2 by e5m2, as grad_weight would"},
        formats=Formats(input="fp8_e5m2", weight="fp8_e4m3", grad_output="fp8_e5m2"),
    ),
    Refusal(
        {"native": "block-scaled kernels give bf16, and activations are torch.float32", "torchao": "which MXFP8Recipe"},
        formats=Formats.all("mxfp8"),
        recipe=MXFP8Recipe(),
    ),
    Refusal({"native": "not None", "torchao": "which None isn't"}, recipe=None),
    Refusal({"native": "backward='dequantized'", "torchao": "isn't"}, recipe=CurrentRecipe(backward="dequantized")),
    Refusal(
        {"emulated": "format 'nvfp4' has scales, so that it needs a recipe"}, formats=Formats.all("nvfp4"), recipe=None
    ),
    Refusal(
        {"emulated": "must be of one format, not bf16 and nvfp4; or set hadamard=False"},
        formats=Formats(input="bf16", weight="nvfp4", grad_output="nvfp4"),
        recipe=NVFP4Recipe(),
    ),
    Refusal({"emulated": "recipe 'mxfp8' scales mxfp8, not fp8_e4m3"}, recipe=MXFP8Recipe()),
    Refusal({"native": "'delayed'", "torchao": "which DelayedRecipe"}, recipe=DelayedRecipe()),
    Refusal({"torchao": "rowwise has the formats fp8_e4m3, not fp8_e4m3/fp8_e4m3/fp8_e5m2"}, recipe=RowwiseRecipe()),
]


@pytest.mark.parametrize(
    ("backend", "refusal"),
    [(name, refusal) for refusal in REFUSALS for name in refusal.answers],
    ids=lambda v: v if isinstance(v, str) else next(iter(v.answers.values())),
)
def test_refusals_say_why(backend: str, refusal: Refusal) -> None:
    if not get_backend(backend).available()[0]:
        pytest.skip(get_backend(backend).available()[1])
    chosen, reason = choose(
        refusal.op,
        refusal.formats,
        torch.empty(refusal.x, dtype=refusal.dtype, device="meta"),
        torch.empty(refusal.weight, device="meta"),
        (backend,),
        "training",
        recipe=refusal.recipe,
    )
    assert chosen is None
    assert reason.startswith(f"not {backend}: ")
    assert refusal.answers[backend] in reason


@pytest.mark.parametrize("case", [Block128Recipe(), NVFP4Recipe(), MXFP8Recipe(weight_2d=True)], ids=str)
def test_emulation_takes_every_other_recipe(case: Recipe) -> None:
    formats = Formats.all({"fp8": "fp8_e4m3"}.get(case.family, case.family))
    spec = supported("emulated", Case(formats, case, plain))
    torch.manual_seed(0)
    low = run(lambda *a: get_backend("emulated").linear(*a, spec), *operands())
    high = run(F.linear, *operands())
    bound = 0.25 if case.family == "nvfp4" else 0.06
    for a, b in zip(low, high, strict=True):
        assert (a - b).norm() <= bound * b.norm()
    assert not torch.equal(low[0], high[0])
