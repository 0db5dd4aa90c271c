"""What goes wrong, mostly in silence, when Transformer Engine's layers are used as they come: each trap by name."""

import ast
import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec.backends import LinearSpec
from autoprec.backends.transformer_engine import recipes
from autoprec.backends.transformer_engine.backend import TransformerEngineBackend
from autoprec.formats import FORMATS
from autoprec.formats.scales import delayed_scale
from autoprec.plan import Formats
from autoprec.recipes import Block128Recipe, CurrentRecipe, DelayedRecipe, MXFP8Recipe, NVFP4Recipe, Recipe

pytestmark = pytest.mark.te

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
E4M3 = Formats.all("fp8_e4m3")


def spec(recipe: Recipe, formats: Formats = HYBRID) -> LinearSpec:
    return LinearSpec(formats=formats, recipe=recipe)


def tokens(hopper: ModuleType, largest: float, seed: int = 0) -> Tensor:
    """``[32, 32]`` with that largest value."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
    return hopper.on_gpu((x / x.abs().max() * largest).bfloat16())


def weights(seed: int = 9) -> nn.Parameter:
    return nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)))


def quantized(hopper: ModuleType) -> list[tuple[str, float]]:
    """Format and scale of each operand since the last call: input, weight and, after a backward, the gradient."""
    found = [call for kind, call in hopper.CALLS if kind == "quantize"]
    hopper.CALLS.clear()
    return found


def step(backend: Any, hopper: ModuleType, weight: Tensor, largest: float, of: LinearSpec, grad: float = 1.0) -> list:
    """One training step; the operands' formats and scales."""
    hopper.CALLS.clear()
    output = backend.linear(tokens(hopper, largest), weight, None, of)
    output.backward(torch.full_like(output, grad))
    return quantized(hopper)


def expected(recipe: DelayedRecipe, amaxes: list[float], largest: float = FORMATS["fp8_e4m3"].max) -> list[float]:
    """Scales of successive steps: the first by its own amax, then from the history."""
    history, found = torch.zeros(recipe.history_length, 1), []
    scale = torch.ones(1)
    for i, amax in enumerate(torch.tensor(amaxes).bfloat16().float()):
        if i == 0:
            _, scale = delayed_scale(amax[None, None], scale, largest, margin=recipe.margin)
        found.append(scale.item())
        history[0] = amax
        history, scale = delayed_scale(history, scale, largest, margin=recipe.margin, algorithm=recipe.algorithm)
    return found


def test_a_changed_recipe_of_the_same_class_reaches_the_kernels(hopper: ModuleType) -> None:
    backend, weight = TransformerEngineBackend(), weights()
    assert [name for name, _ in step(backend, hopper, weight, 1.0, spec(CurrentRecipe()))][-1] == "fp8_e5m2"
    assert [name for name, _ in step(backend, hopper, weight, 1.0, spec(CurrentRecipe(), E4M3))][-1] == "fp8_e4m3"
    scales = [s for _, s in step(backend, hopper, weight, 1.0, spec(CurrentRecipe(power_of_two=True)))]
    assert all(torch.frexp(torch.tensor(s)).mantissa == 0.5 for s in scales)


def test_power_of_two_and_epsilon_are_not_overridden_by_te_linear(hopper: ModuleType) -> None:
    backend = TransformerEngineBackend()
    step(backend, hopper, weights(), 1.0, spec(CurrentRecipe(power_of_two=True, epsilon=0.5)))
    (layer,) = backend._layers.values()
    of_kind = layer._linear.quantizers
    used = [of_kind["scaling_fwd"][0], of_kind["scaling_fwd"][1], of_kind["scaling_bwd"][0]]
    assert [(q.force_pow_2_scales, q.amax_epsilon) for q in used] == [(True, 0.5)] * 3
    assert step(backend, hopper, weights(), 0.25, spec(CurrentRecipe(epsilon=0.5)))[0][1] == 448 / 0.5


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [2, 16])
def test_delayed_scales_follow_their_own_recipe(hopper: ModuleType, algorithm: Any, margin: int, length: int) -> None:
    recipe = DelayedRecipe(margin=margin, history_length=length, algorithm=algorithm)
    backend, weight, amaxes = TransformerEngineBackend(), weights(), [2.0, 8.0, 1.0, 0.5, 4.0]
    found = [step(backend, hopper, weight, amax, spec(recipe))[0][1] for amax in amaxes]
    assert found == pytest.approx(expected(recipe, amaxes))


def test_recipes_that_print_alike_stay_apart(hopper: ModuleType) -> None:
    # Transformer Engine's text of a recipe, by which it finds the recipe again, leaves the algorithm out.
    both = [DelayedRecipe(algorithm="max"), DelayedRecipe(algorithm="most_recent")]
    assert len({str(recipes.te_recipe(recipe, HYBRID)) for recipe in both}) == 1
    backend, sites, amaxes = TransformerEngineBackend(), [weights(1), weights(2)], [8.0, 1.0, 2.0]
    found: list[list[float]] = [[], []]
    for amax in amaxes:
        for site, recipe, scales in zip(sites, both, found, strict=True):
            scales.append(step(backend, hopper, site, amax, spec(recipe))[0][1])
    assert found == [pytest.approx(expected(recipe, amaxes)) for recipe in both]
    assert found[0] != found[1]


@pytest.mark.parametrize("change", [{"margin": 3}, {"history_length": 16}, {"algorithm": "most_recent"}])
def test_a_changed_delayed_recipe_starts_anew(hopper: ModuleType, change: dict[str, Any]) -> None:
    backend, weight = TransformerEngineBackend(), weights()
    for amax in (8.0, 2.0):
        step(backend, hopper, weight, amax, spec(DelayedRecipe()))
    changed = DelayedRecipe(**change)
    found = [step(backend, hopper, weight, amax, spec(changed))[0][1] for amax in (1.0, 2.0, 4.0)]
    assert found == pytest.approx(expected(changed, [1.0, 2.0, 4.0]))


def test_a_module_that_runs_twice_in_one_region_learns_from_both(hopper: ModuleType) -> None:
    te = importlib.import_module("transformer_engine.pytorch")
    recipe, backend, weight = DelayedRecipe(), TransformerEngineBackend(), weights()
    with te.autocast(enabled=True, recipe=recipes.te_recipe(recipe, HYBRID)):
        outputs = [backend.linear(tokens(hopper, amax), weight, None, spec(recipe)) for amax in (8.0, 2.0)]
    sum(outputs).sum().backward()  # type: ignore[union-attr]
    assert step(backend, hopper, weight, 1.0, spec(recipe))[0][1] == 448 / 8


def test_no_layer_updates_another(hopper: ModuleType) -> None:
    backend, sites = TransformerEngineBackend(), [weights(1), weights(2)]
    hopper.CALLS.clear()
    outputs = [backend.linear(tokens(hopper, 4.0), site, None, spec(DelayedRecipe())) for site in sites]
    sum(outputs).sum().backward()  # type: ignore[union-attr]
    assert not hopper.remembered()[1]
    assert [kind for kind, _ in hopper.CALLS].count("update") == 2  # the gradients'; the forward's come later


def test_a_refused_recipe_leaves_no_region_open(hopper: ModuleType) -> None:
    backend, weight = TransformerEngineBackend(), weights()
    with pytest.raises((ValueError, AssertionError), match="divisible"):  # what supports() would have refused
        backend.linear(hopper.on_gpu(torch.zeros(16, 8)), nn.Parameter(torch.zeros(16, 8)), None, spec(CurrentRecipe()))
    assert hopper.region() == (0, False)
    (layer,) = backend._layers.values()
    assert layer._linear.weight is None
    step(backend, hopper, weight, 1.0, spec(CurrentRecipe()))


def test_a_region_of_the_user_does_not_change_ours(hopper: ModuleType) -> None:
    te = importlib.import_module("transformer_engine.pytorch")
    backend, weight = TransformerEngineBackend(), weights()
    for enabled in (True, False):
        with te.autocast(enabled=enabled, recipe=recipes.te_recipe(DelayedRecipe(), E4M3)):
            hopper.CALLS.clear()
            backend.linear(tokens(hopper, 2.0), weight, None, spec(CurrentRecipe())).sum().backward()
            assert [name for name, _ in quantized(hopper)] == ["fp8_e4m3", "fp8_e4m3", "fp8_e5m2"]


def test_quantized_model_init_of_the_user_does_not_reach_a_layer(hopper: ModuleType) -> None:
    te = importlib.import_module("transformer_engine.pytorch")
    backend = TransformerEngineBackend()
    with te.quantized_model_init(enabled=True, recipe=recipes.te_recipe(CurrentRecipe(), HYBRID)):
        assert len(step(backend, hopper, weights(), 1.0, spec(CurrentRecipe()))) == 3
    (layer,) = backend._layers.values()
    assert not layer._linear.primary_weights_in_fp8


def test_the_first_gradient_is_not_lost_to_a_scale_of_one(hopper: ModuleType) -> None:
    weight, x = weights(), tokens(hopper, 1.0).requires_grad_()
    output = TransformerEngineBackend().linear(x, weight, None, spec(DelayedRecipe()))
    output.backward(torch.full_like(output, 1e-7))  # e5m2 ends at 1.5e-5
    assert x.grad is not None
    assert x.grad.abs().max() > 0
    assert weight.grad is not None
    assert weight.grad.abs().max() > 0


def test_evaluation_teaches_nothing(hopper: ModuleType) -> None:
    backend, weight, recipe = TransformerEngineBackend(), weights(), DelayedRecipe()
    with torch.no_grad():
        backend.linear(tokens(hopper, 32.0), weight, None, spec(recipe))  # a copy may be evaluated first
    step(backend, hopper, weight, 2.0, spec(recipe))
    with torch.no_grad():
        backend.linear(tokens(hopper, 64.0), weight, None, spec(recipe))
    assert step(backend, hopper, weight, 1.0, spec(recipe))[0][1] == 448 / 2
    assert step(backend, hopper, weight, 1.0, spec(recipe))[0][1] == 448 / 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [CurrentRecipe(), DelayedRecipe()], ids=["current", "delayed"])
def test_recomputation_has_the_scales_of_the_first_pass(hopper: ModuleType, recipe: Recipe, reentrant: bool) -> None:
    losses = []
    for recompute in (False, True):
        backend, weight, trace = TransformerEngineBackend(), weights(), []

        def site(x: Tensor, backend: Any = backend, weight: Tensor = weight) -> Tensor:
            return backend.linear(x, weight, None, spec(recipe))

        for amax in (2.0, 8.0, 1.0):
            x = tokens(hopper, amax).requires_grad_()
            weight.grad = None
            output = checkpoint(site, x, use_reentrant=reentrant) if recompute else site(x)
            output.float().square().sum().as_subclass(Tensor).backward()
            assert x.grad is not None
            assert weight.grad is not None
            trace += [output.detach(), x.grad, weight.grad]
        losses.append(trace)
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_weights_in_fp32_meet_16_bit_activations_without_an_outer_autocast(hopper: ModuleType) -> None:
    for weight_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        weight = nn.Parameter(weights().detach().to(weight_dtype))
        output = TransformerEngineBackend().linear(tokens(hopper, 1.0).to(dtype), weight, None, spec(CurrentRecipe()))
        output.sum().backward()
        assert output.dtype == dtype
        assert weight.grad is not None
        assert weight.grad.dtype == weight_dtype


def test_a_bias_in_fp32_is_not_rounded_to_bf16(hopper: ModuleType) -> None:
    x, weight, bias = tokens(hopper, 1.0).float(), weights(), torch.full((32,), 1 + 2.0**-20)
    backend = TransformerEngineBackend()
    plain, moved = (backend.linear(x, weight, b, spec(CurrentRecipe())) for b in (None, bias))
    assert torch.equal(moved, plain + bias)


def test_a_layer_without_bias_has_none_whatever_its_attribute_says(hopper: ModuleType) -> None:
    backend, x, weight, bias = TransformerEngineBackend(), tokens(hopper, 1.0), weights(), torch.ones(32)
    outputs = [backend.linear(x, weight, b, spec(CurrentRecipe())) for b in (bias, None, bias)]
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0].float(), outputs[1].float() + 1, rtol=0, atol=0.05)


@pytest.mark.parametrize("recipe", [CurrentRecipe(), DelayedRecipe(), Block128Recipe(), MXFP8Recipe(), NVFP4Recipe()])
def test_every_field_that_an_environment_variable_sets_is_given(hopper: ModuleType, recipe: Recipe) -> None:
    common = importlib.import_module("transformer_engine.common.recipe")
    kind = getattr(common, recipes.CLASSES[type(recipe)])
    (definition,) = (
        node
        for node in ast.parse(inspect.getsource(common)).body
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    fields = {
        ast.unparse(node.target)
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and node.value is not None and "getenv" in ast.unparse(node.value)
    }
    # These two say how, where nvfp4_4over6 says whether.
    ours = set(recipes._settings(recipe, HYBRID, common)) | {"nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}
    assert fields <= ours


def test_a_trial_starts_from_nothing(hopper: ModuleType) -> None:
    backend, weight, recipe = TransformerEngineBackend(), weights(), DelayedRecipe()
    step(backend, hopper, weight, 64.0, spec(recipe))
    step(backend, hopper, weight, 1.0, spec(CurrentRecipe()))
    assert hopper.remembered()[0]
    backend.reset()
    assert hopper.remembered() == [{}, {}]
    assert not backend._layers
    assert step(backend, hopper, weight, 1.0, spec(recipe))[0][1] == 448


def test_what_was_learned_goes_with_the_plan(hopper: ModuleType) -> None:
    backend, recipe, sites = TransformerEngineBackend(), DelayedRecipe(), [weights(1), weights(2)]
    for site in sites:
        step(backend, hopper, site, 64.0, spec(recipe))
    backend.forget([sites[0]])
    assert step(backend, hopper, sites[0], 1.0, spec(recipe))[0][1] == 448
    assert step(backend, hopper, sites[1], 1.0, spec(recipe))[0][1] == 448 / 64
