"""Sites run by the real te.Linear: numbers, gradients, dtypes, shapes, and what belongs to whom."""

import copy
import gc
import pickle
import weakref
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.backends import LinearSpec, choose, get_backend
from autoprec.backends.emulated import EmulatedBackend
from autoprec.backends.transformer_engine.backend import TransformerEngineBackend
from autoprec.errors import BackendError
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe, DelayedRecipe, Recipe

pytestmark = pytest.mark.te

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
E4M3 = Formats.all("fp8_e4m3")
ROWS, OUT, IN = 33, 48, 80


def operands(dtype: torch.dtype = torch.bfloat16, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias and grad_output."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, IN, generator=generator).to(dtype)
    weight = torch.randn(OUT, IN, generator=generator) / IN**0.5
    grad = (torch.randn(rows, OUT, generator=generator) * 1e-3).to(dtype)
    return x, weight, torch.randn(OUT, generator=generator), grad


def run(backend: Any, spec: LinearSpec, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Output and gradients, as plain tensors."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, *([] if bias is None else [bias]))]
    output = backend.linear(*leaves, *([None] if bias is None else []), spec)
    output.backward(grad.to(output.dtype))
    return [t.detach().as_subclass(Tensor) for t in (output, *(leaf.grad for leaf in leaves if leaf.grad is not None))]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("formats", [HYBRID, E4M3], ids=["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", [CurrentRecipe(), CurrentRecipe(power_of_two=True), DelayedRecipe()], ids=str)
def test_operands_and_gradients_are_those_of_emulation(
    hopper: ModuleType, recipe: Recipe, formats: Formats, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight, bias, grad = operands(dtype)
    spec = LinearSpec(formats=formats, recipe=recipe)
    arguments = weight, bias if with_bias else None, grad
    got = run(TransformerEngineBackend(), spec, hopper.on_gpu(x), *arguments)
    wanted = run(get_backend("emulated"), spec, x, *arguments)
    assert [t.dtype for t in got] == [t.dtype for t in wanted]
    for name, a, b in zip(("output", "grad_input", "grad_weight", "grad_bias"), got, wanted, strict=False):
        # The kernels round the bias, and all gradients, to the activation's dtype.
        tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item(), msg=name)


def test_delayed_scales_are_those_of_emulation_step_by_step(hopper: ModuleType) -> None:
    spec = LinearSpec(formats=HYBRID, recipe=DelayedRecipe(history_length=3))
    x, weight, _, grad = operands(torch.float32)
    traces = []
    for backend, put in ((TransformerEngineBackend(), hopper.on_gpu), (EmulatedBackend(), Tensor.clone)):
        leaf, trace = nn.Parameter(weight.clone()), []
        for size in (1.0, 30.0, 0.5, 0.1, 2.0, 0.01):
            row, leaf.grad = put(x * size).detach().requires_grad_(), None
            output = backend.linear(row, leaf, None, spec)
            output.backward(grad / size)
            with torch.no_grad():
                trace += [output, row.grad, leaf.grad, backend.linear(put(x * 100), leaf, None, spec)]
                leaf -= 0.1 * leaf.grad
        traces.append([t.detach().as_subclass(Tensor) for t in trace])
    for a, b in zip(*traces, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 3, 5, IN), (32, IN)])
def test_tokens_are_padded_to_what_the_backward_needs(hopper: ModuleType, shape: tuple[int, ...]) -> None:
    _, weight, bias, _ = operands()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    leaf = hopper.on_gpu(x).detach().requires_grad_()
    output = TransformerEngineBackend().linear(leaf, weight, bias, LinearSpec(formats=HYBRID, recipe=CurrentRecipe()))
    output.sum().backward()
    assert output.shape == (*shape[:-1], OUT)
    assert leaf.grad is not None
    assert leaf.grad.shape == shape
    assert all(size % 16 == 0 for kind, call in hopper.CALLS if kind == "gemm" for size in call["shape"])


def test_no_tokens_give_no_output(hopper: ModuleType) -> None:
    x, weight, bias, _ = operands(rows=0)
    leaf = nn.Parameter(weight)
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    output = TransformerEngineBackend().linear(hopper.on_gpu(x), leaf, bias, spec)
    assert (output.shape, output.dtype) == ((0, OUT), torch.bfloat16)
    output.sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()


def test_output_dtype_is_as_told(hopper: ModuleType) -> None:
    x, weight, bias, _ = operands()
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe(), output_dtype=torch.float32)
    assert TransformerEngineBackend().linear(hopper.on_gpu(x), weight, bias, spec).dtype == torch.float32


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_asked_for(hopper: ModuleType, trained: tuple[bool, bool, bool]) -> None:
    x, weight, bias, _ = operands()
    tensors = [t.detach().requires_grad_(on) for t, on in zip((hopper.on_gpu(x), weight, bias), trained, strict=True)]
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    TransformerEngineBackend().linear(*tensors, spec).sum().backward()
    assert [t.grad is not None for t in tensors] == list(trained)


class Site(nn.Module):
    """A module whose forward calls the backend with its own Parameters, as a converted one does."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        _, weight, bias, _ = operands()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.backend, self.spec = TransformerEngineBackend(), LinearSpec(formats=HYBRID, recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.weight, self.bias, self.spec)


@pytest.mark.parametrize("recipe", [CurrentRecipe(), DelayedRecipe()], ids=["current", "delayed"])
def test_parameters_and_keys_stay_the_models_own(hopper: ModuleType, recipe: Recipe) -> None:
    site = Site(recipe)
    before, x = dict(site.named_parameters()), hopper.on_gpu(operands()[0])
    optimizer = torch.optim.SGD(site.parameters(), lr=0.1)
    site(x).square().sum().backward()
    optimizer.step()
    assert list(site.state_dict()) == ["weight", "bias"]  # no _extra_state, before or after FP8 has run
    assert all(p is before[name] and p.grad is not None for name, p in site.named_parameters())
    assert list(site.modules()) == [site]
    site.load_state_dict(site.state_dict(), strict=True)


@pytest.mark.parametrize("recipe", [CurrentRecipe(), DelayedRecipe()], ids=["current", "delayed"])
def test_copies_and_pickles_build_their_own_layers(hopper: ModuleType, recipe: Recipe) -> None:
    site, x = Site(recipe), hopper.on_gpu(operands()[0])
    output = site(x)
    for other in (copy.deepcopy(site), pickle.loads(pickle.dumps(site))):
        assert other.backend is not site.backend
        assert torch.equal(other(x), output)
        other(x).sum().backward()
        assert other.weight.grad is not None
        assert site.weight.grad is None


@pytest.mark.parametrize("recipe", [CurrentRecipe(), DelayedRecipe()], ids=["current", "delayed"])
def test_a_layer_keeps_no_parameter_alive(hopper: ModuleType, recipe: Recipe) -> None:
    backend, weight = TransformerEngineBackend(), nn.Parameter(operands()[1])
    spec = LinearSpec(formats=HYBRID, recipe=recipe)
    backend.linear(hopper.on_gpu(operands()[0]), weight, None, spec).sum().backward()
    reference = weakref.ref(weight)
    del weight
    gc.collect()
    assert reference() is None
    assert not len(backend._of_weights)


def test_stateless_recipes_share_a_layer_and_delayed_ones_do_not(hopper: ModuleType) -> None:
    x = hopper.on_gpu(operands()[0])
    for recipe, layers, histories in ((CurrentRecipe(), 1, 0), (DelayedRecipe(), 0, 2)):
        backend = TransformerEngineBackend()
        weights = [nn.Parameter(operands()[1]), nn.Parameter(operands()[1][:32])]
        outputs = [backend.linear(x, w, None, LinearSpec(formats=HYBRID, recipe=recipe)) for w in weights]
        torch.testing.assert_close(outputs[0][:, :32], outputs[1], rtol=0.1, atol=0.1)
        assert (len(backend._layers), len(backend._of_weights)) == (layers, histories)


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_gradients_from_unrounded_or_from_the_forwards_operands(hopper: ModuleType, backward: str) -> None:
    x, weight, _, grad = operands(torch.float32)
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe(backward=backward))  # type: ignore[arg-type]
    meta = torch.empty_like(x, device="meta"), torch.empty_like(weight, device="meta")
    backend, reason = choose("linear", HYBRID, *meta, ("transformer_engine",), "training", recipe=spec.recipe)
    if backend is None:
        pytest.skip(reason)
    got = run(TransformerEngineBackend(), spec, hopper.on_gpu(x), weight, None, grad)
    wanted = run(get_backend("emulated"), spec, x, weight, None, grad)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_fast_accumulation_is_as_the_recipe_says(hopper: ModuleType) -> None:
    x, weight, _, grad = operands()
    for fast_output, fast_grads in ((True, False), (False, True)):
        hopper.CALLS.clear()
        recipe = CurrentRecipe(fast_output=fast_output, fast_grads=fast_grads)
        spec = LinearSpec(formats=HYBRID, recipe=recipe)
        run(TransformerEngineBackend(), spec, hopper.on_gpu(x), weight, None, grad)
        split = [call["split"] for kind, call in hopper.CALLS if kind == "gemm"]
        assert split == [not fast_output, not fast_grads, not fast_grads]


def test_a_computed_weight_works_without_history_alone(hopper: ModuleType) -> None:
    x, weight, _, _ = operands()
    leaf, gpu = nn.Parameter(weight), hopper.on_gpu(x)
    backend = TransformerEngineBackend()
    output = backend.linear(gpu, leaf * 2, None, LinearSpec(formats=HYBRID, recipe=CurrentRecipe()))
    output.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(output.detach().float(), F.linear(x, weight.bfloat16() * 2).float(), rtol=0.1, atol=0.3)
    with pytest.raises(BackendError, match="computed anew in each call; use the recipe 'current'"):
        backend.linear(gpu, leaf * 2, None, LinearSpec(formats=HYBRID, recipe=DelayedRecipe()))


def test_a_cpu_tensor_is_an_error_that_says_what_to_do(hopper: ModuleType) -> None:
    x, weight, bias, _ = operands()
    with pytest.raises(BackendError, match="got an input on cpu; move the model to a CUDA device"):
        TransformerEngineBackend().linear(x, weight, bias, LinearSpec(formats=HYBRID, recipe=CurrentRecipe()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, after the break
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of imports that are not ours
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("recipe", [CurrentRecipe(), DelayedRecipe()], ids=["current", "delayed"])
def test_a_compiled_model_breaks_its_graph_at_the_layer(hopper: ModuleType, recipe: Recipe) -> None:
    x, weight = operands(torch.float32)[0], nn.Parameter(operands()[1])  # fp32 needs no autocast
    meta = torch.empty_like(x, device="meta")
    backend, reason = choose("linear", HYBRID, meta, weight, ("transformer_engine",), "training", recipe=recipe)
    assert backend is not None, reason
    spec = LinearSpec(formats=HYBRID, recipe=recipe)

    def function(x: Tensor) -> Tensor:
        return backend.linear(hopper.on_gpu(x * 2), weight, None, spec) * 3

    wanted = function(x)
    torch._dynamo.reset()
    with mock.patch("torch.cuda.is_available", return_value=False):  # else Dynamo asks for the GPU's state
        compiled = torch.compile(function, backend="eager")
        if isinstance(recipe, CurrentRecipe):  # the other has learned from the first call
            torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=0)
        compiled(x).as_subclass(Tensor).sum().backward()
    assert weight.grad is not None
