"""Emulation: which operands meet in which product, vmap, empty inputs, and the recipes' backward options."""

import pytest
import torch
from torch import Tensor

from autoprec.backends import LinearSpec, get_backend
from autoprec.backends.operands import multiply, quantize_operand
from autoprec.formats.quantize import Quantized
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe, MXFP8Recipe, NVFP4Recipe, Recipe, RowwiseRecipe

HYBRID = Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2")
E4M3 = Formats.all("fp8_e4m3")


def operands(rows: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and grad_output, with values over several orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    spread = [torch.exp(2 * torch.randn(shape, generator=generator)) for shape in ((rows, 40), (56, 40), (rows, 56))]
    return tuple(torch.randn(s.shape, generator=generator) * s for s in spread)  # type: ignore[return-value]


def gradients(spec: LinearSpec) -> tuple[Tensor, Tensor]:
    x, weight, grad = operands()
    x.requires_grad_()
    weight.requires_grad_()
    get_backend("emulated").linear(x, weight, None, spec).backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad, weight.grad


def quantized(x: Tensor, recipe: Recipe, role: str, gemm: str, formats: Formats) -> Quantized:
    return quantize_operand(x, getattr(formats, role), recipe, role, gemm)  # type: ignore[arg-type]


@pytest.mark.parametrize("formats", [HYBRID, E4M3])
@pytest.mark.parametrize("recipe", [CurrentRecipe, RowwiseRecipe])
def test_gradients_in_high_precision_use_the_operands_as_they_came(
    formats: Formats, recipe: type[CurrentRecipe] | type[RowwiseRecipe]
) -> None:
    x, weight, grad = operands()
    spec = LinearSpec(formats=formats, recipe=recipe(backward="high_precision"))
    grad_input, grad_weight = gradients(spec)
    torch.testing.assert_close(grad_input, grad @ weight)
    torch.testing.assert_close(grad_weight, grad.T @ x)


def test_dequantized_gradients_use_the_forwards_operands() -> None:
    x, weight, grad = operands()
    recipe = RowwiseRecipe(backward="dequantized")
    grad_input, grad_weight = gradients(LinearSpec(formats=E4M3, recipe=recipe))
    torch.testing.assert_close(grad_input, grad @ quantized(weight, recipe, "weight", "output", E4M3).dequantize())
    torch.testing.assert_close(grad_weight, grad.T @ quantized(x, recipe, "input", "output", E4M3).dequantize())


def test_rowwise_with_grad_weight_in_high_precision() -> None:
    x, weight, grad = operands()
    recipe = RowwiseRecipe(grad_weight="high_precision")
    grad_input, grad_weight = gradients(LinearSpec(formats=E4M3, recipe=recipe))
    torch.testing.assert_close(grad_weight, grad.T @ x)
    per_tensor = quantized(weight.T, CurrentRecipe(power_of_two=True), "weight", "grad_input", E4M3)
    wanted = multiply(quantized(grad, recipe, "grad_output", "grad_input", E4M3), per_tensor)
    assert torch.equal(grad_input, wanted)


@pytest.mark.parametrize("recipe", [RowwiseRecipe(), MXFP8Recipe(), NVFP4Recipe(stochastic_rounding=False)], ids=str)
def test_each_product_quantises_along_the_dimension_it_contracts(recipe: Recipe) -> None:
    x, weight, grad = operands()
    formats = E4M3 if recipe.family == "fp8" else Formats.all(recipe.family)
    grad_input, grad_weight = gradients(LinearSpec(formats=formats, recipe=recipe))
    assert torch.equal(
        grad_input,
        multiply(
            quantized(grad, recipe, "grad_output", "grad_input", formats),
            quantized(weight.T, recipe, "weight", "grad_input", formats),
        ),
    )
    assert torch.equal(
        grad_weight,
        multiply(
            quantized(grad.T, recipe, "grad_output", "grad_weight", formats),
            quantized(x.T, recipe, "input", "grad_weight", formats),
        ),
    )


def test_stochastic_rounding_draws_anew_and_touches_gradients_only() -> None:
    x, weight, _ = operands()
    spec = LinearSpec(formats=Formats.all("nvfp4"), recipe=NVFP4Recipe())
    linear = get_backend("emulated").linear
    assert torch.equal(linear(x, weight, None, spec), linear(x, weight, None, spec))
    torch.manual_seed(0)
    first, again = gradients(spec), gradients(spec)
    assert not torch.equal(first[0], again[0])
    torch.manual_seed(0)
    assert torch.equal(first[0], gradients(spec)[0])


def test_vmap_gives_each_sample_its_own_scale() -> None:
    x, weight, _ = operands()
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    linear = get_backend("emulated").linear
    batched = torch.vmap(lambda row: linear(row, weight, None, spec))(x.reshape(4, 6, 40))
    for sample, rows in zip(batched, x.reshape(4, 6, 40), strict=True):
        assert torch.equal(sample, linear(rows, weight, None, spec))


def test_gradients_for_each_sample() -> None:
    x, weight, _ = operands()
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())

    def loss(weight: Tensor, rows: Tensor) -> Tensor:
        return get_backend("emulated").linear(rows, weight, None, spec).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x.reshape(4, 6, 40))
    for got, rows in zip(per_sample, x.reshape(4, 6, 40), strict=True):
        torch.testing.assert_close(got, torch.func.grad(loss)(weight, rows))


def test_an_empty_batch() -> None:
    _, weight, _ = operands()
    for recipe in (CurrentRecipe(), RowwiseRecipe(), MXFP8Recipe()):
        formats = Formats.all(recipe.family if recipe.family == "mxfp8" else "fp8_e4m3")
        x = torch.zeros(0, 40, requires_grad=True)
        leaf = weight.clone().requires_grad_()
        get_backend("emulated").linear(x, leaf, None, LinearSpec(formats=formats, recipe=recipe)).sum().backward()
        assert leaf.grad is not None
        assert not leaf.grad.any()
        assert x.grad is not None
        assert x.grad.shape == (0, 40)


def test_tiny_scales_do_not_underflow_together() -> None:
    x, weight, _ = operands()
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    linear = get_backend("emulated").linear
    usual = linear(x, weight, None, spec)
    product = linear(x * 2.0**-70, weight * 2.0**-70, None, spec)
    assert product.count_nonzero() > 0.5 * usual.count_nonzero()


def test_nan_and_infinity_are_not_hidden() -> None:
    x, weight, _ = operands()
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    x[3, 4] = torch.nan
    output = get_backend("emulated").linear(x, weight, None, spec)
    assert output[3].isnan().all()


def test_second_derivatives_are_refused() -> None:
    x, weight, _ = operands()
    x.requires_grad_()
    spec = LinearSpec(formats=HYBRID, recipe=CurrentRecipe())
    (first,) = torch.autograd.grad(
        get_backend("emulated").linear(x, weight, None, spec).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
