"""Quantised operands: blocks at the edges, 2-D blocks, rotation, stochastic rounding."""

import pytest
import torch

from autoprec.formats import FORMATS, round_to
from autoprec.formats.quantize import (
    quantize_block128,
    quantize_mxfp8,
    quantize_nvfp4,
    quantize_rowwise,
    quantize_tensorwise,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers over several orders of magnitude, so that each block has a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(3 * torch.randn(*shape, generator=generator))


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).norm() / x.norm()).item()


def test_mxfp8_blocks_are_independent_and_short_at_the_edge() -> None:
    x = normal(3, 70)
    whole = round_to(x, "mxfp8")
    for start in (0, 32, 64):
        assert torch.equal(whole[:, start : start + 32], round_to(x[:, start : start + 32], "mxfp8"))


def test_mxfp8_by_hand() -> None:
    block = torch.zeros(1, 32)
    block[0, :4] = torch.tensor([449.0, 1.0, 2.0**-9, -17.0])
    # 449 needs a scale of 2, so the step at 449 is 2 * 16, at 17 it is 2, and the smallest value 2 ** -8.
    assert round_to(block, "mxfp8")[0, :4].tolist() == [448.0, 1.0, 0.0, -16.0]


def test_mxfp8_floor_saturates() -> None:
    block = torch.full((1, 32), 500.0)
    assert quantize_mxfp8(block, rounding="floor").dequantize()[0, 0] == 448
    assert quantize_mxfp8(block).dequantize()[0, 0] == 512


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_nvfp4])
def test_2d_blocks_give_the_transpose_the_same_values(quantize) -> None:
    x = normal(40, 70)
    assert torch.equal(quantize(x, two_d=True).dequantize(), quantize(x.T.contiguous(), two_d=True).dequantize().T)
    assert not torch.equal(quantize(x).dequantize(), quantize(x.T.contiguous()).dequantize().T)


def test_block128_scales_each_tile_by_itself() -> None:
    x = normal(130, 200)
    got = quantize_block128(x, FORMATS["fp8_e4m3"], two_d=True).dequantize()
    for rows in (slice(0, 128), slice(128, 130)):
        for columns in (slice(0, 128), slice(128, 200)):
            tile = quantize_tensorwise(x[rows, columns], FORMATS["fp8_e4m3"], power_of_two=True).dequantize()
            assert torch.equal(got[rows, columns], tile)


def test_rowwise_scales_each_row_by_itself() -> None:
    x = normal(5, 64)
    got = quantize_rowwise(x, FORMATS["fp8_e4m3"])
    assert got.scale_inv.shape == (5, 1)
    for row in range(5):
        alone = quantize_rowwise(x[row : row + 1], FORMATS["fp8_e4m3"])
        assert torch.equal(got.dequantize()[row], alone.dequantize()[0])


def test_tensorwise_maps_the_largest_value_to_the_formats_largest() -> None:
    x = normal(8, 8)
    got = quantize_tensorwise(x, FORMATS["fp8_e5m2"])
    assert got.values.abs().max() == FORMATS["fp8_e5m2"].max
    assert quantize_tensorwise(torch.zeros(2, 2), FORMATS["fp8_e4m3"]).dequantize().tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_block(poison: float) -> None:
    x = normal(2, 64)
    x[0, 3] = poison
    got = quantize_mxfp8(x).dequantize()
    assert not got[0, 3].isfinite()
    assert torch.equal(got[:, 32:], quantize_mxfp8(x[:, 32:]).dequantize())
    assert torch.equal(got[1], quantize_mxfp8(x[1:]).dequantize()[0])


def test_rotation_leaves_a_product_as_it_is_and_flattens_an_outlier() -> None:
    x, w = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), normal(12, 40)
    x[:, 5] = 100.0
    a, b = (quantize_nvfp4(t, hadamard=True).dequantize() for t in (x, w))
    assert a.shape == (8, 48)
    plain = relative_error(x @ w.T, quantize_nvfp4(x).dequantize() @ w.T)
    assert relative_error(x @ w.T, a @ b.T) < 0.5
    assert plain > 0
    ones = torch.ones(1, 16)
    rotated = quantize_nvfp4(ones, hadamard=True).dequantize()
    assert rotated.norm().item() == pytest.approx(4.0, rel=0.15)


def test_stochastic_rounding_is_right_on_average_and_never_leaves_the_neighbours() -> None:
    torch.manual_seed(0)
    sizes = torch.linspace(-6, 6, 90).reshape(6, 15)
    # Each block holds 6 * 448, for which its scale is exact.
    blocks = torch.cat([sizes, torch.full((6, 1), 6.0)], 1).flatten() * 448
    got = quantize_nvfp4(blocks.repeat(4096, 1), stochastic=True).dequantize() / 448
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = blocks / 448
    assert torch.isin(got.abs(), grid).all()
    below = grid[torch.searchsorted(grid, x.abs(), right=True) - 1]
    above = grid[torch.searchsorted(grid, x.abs())]
    assert ((got.abs() == below) | (got.abs() == above)).all()
    # Odds come in 256ths of a step of up to 2; the mean of 4096 draws has a standard error of at most 1/64.
    assert (got.mean(0) - x).abs().max() < 2 / 256 + 4 / 64


def test_stochastic_rounding_follows_torchs_seed() -> None:
    x = normal(16, 64)
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append(quantize_nvfp4(x, stochastic=True).dequantize())
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], quantize_nvfp4(x, stochastic=True).dequantize())
