"""Formats: ranges, reference rounding and saturation, against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from autoprec.errors import UsageError
from autoprec.formats import FORMATS, get_format, round_to

REFERENCES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
ELEMENT_FORMATS = ("fp32", "tf32", *REFERENCES)


def reference(x: np.ndarray, name: str) -> np.ndarray:
    """ml_dtypes' rounding of fp32 numbers, saturated."""
    largest = np.float32(FORMATS[name].max)
    with np.errstate(invalid="ignore"):
        return np.clip(x, -largest, largest).astype(REFERENCES[name]).astype(np.float32)


def assert_same_bits(got: torch.Tensor, wanted: np.ndarray) -> None:
    got_bits, wanted_bits = got.numpy().view(np.int32), wanted.view(np.int32)
    differ = (got_bits != wanted_bits) & ~(np.isnan(got.numpy()) & np.isnan(wanted))
    assert not differ.any(), f"{got.numpy()[differ][:5]} instead of {wanted[differ][:5]}"


def all_codes(name: str) -> np.ndarray:
    """Every code of a format of up to 16 bits, as fp32."""
    dtype = REFERENCES[name]
    unsigned = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    return np.arange(2 ** (8 * np.dtype(unsigned).itemsize), dtype=unsigned).view(dtype).astype(np.float32)


@pytest.mark.parametrize("name", REFERENCES)
def test_every_code_is_its_own_rounding(name: str) -> None:
    codes = all_codes(name)
    largest = np.float32(FORMATS[name].max)
    assert_same_bits(round_to(torch.from_numpy(codes), name), np.clip(codes, -largest, largest))


@pytest.mark.parametrize("source", ["bf16", "fp16"])
@pytest.mark.parametrize("name", REFERENCES)
def test_all_16_bit_inputs_round_as_ml_dtypes(name: str, source: str) -> None:
    codes = all_codes(source)
    assert_same_bits(round_to(torch.from_numpy(codes), name), reference(codes, name))


@pytest.mark.parametrize("name", REFERENCES)
def test_random_bits_round_as_ml_dtypes(name: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    x = bits.view(np.float32)
    assert_same_bits(round_to(torch.from_numpy(x), name), reference(x, name))


@pytest.mark.parametrize("name", REFERENCES)
def test_ties_and_their_neighbours_round_as_ml_dtypes(name: str) -> None:
    grid = np.unique(all_codes(name)[np.isfinite(all_codes(name))])
    ties = ((grid[:-1].astype(np.float64) + grid[1:]) / 2).astype(np.float32)
    x = np.concatenate(
        [np.nextafter(ties, -np.inf, dtype=np.float32), ties, np.nextafter(ties, np.inf, dtype=np.float32)]
    )
    assert_same_bits(round_to(torch.from_numpy(x), name), reference(x, name))


def test_tf32_rounds_to_ten_bits_ties_to_even() -> None:
    step = 2.0**-10
    x = torch.tensor([1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-23, -1 - step / 2, -torch.inf, -0.0])
    wanted = torch.tensor([1.0, 1 + 2 * step, 1 + step, -1.0, -FORMATS["tf32"].max, -0.0])
    assert_same_bits(round_to(x, "tf32"), wanted.numpy())
    bits = np.random.default_rng(0).integers(0, 2**32, 10**5, dtype=np.uint32).view(np.float32)
    rounded = round_to(torch.from_numpy(bits[np.isfinite(bits)]), "tf32")
    assert (rounded.view(torch.int32) & 0x1FFF == 0).all()
    error = (rounded.double() - torch.from_numpy(bits[np.isfinite(bits)]).double()).abs()
    assert (error <= rounded.double().abs().clamp(min=2.0**-126) * 2.0**-11).all()


def test_4_bit_grid_and_its_ties() -> None:
    # An amax of 6 * 448 makes both scales exact: 1 for the tensor, 448 for the block.
    block = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.26, 5.01, 0, -6.0, 1.0])
    wanted = torch.tensor([6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0, 0.5, 6.0, 0, -6.0, 1.0])
    assert torch.equal(round_to(block * 448, "nvfp4"), wanted * 448)


@pytest.mark.parametrize("code", range(16))
def test_every_4_bit_code_is_its_own_rounding(code: int) -> None:
    value = float(np.array([code], np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)[0])
    assert round_to(torch.tensor([6.0, value]) * 448, "nvfp4")[1] == value * 448


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_integers_are_symmetric_and_scaled_by_the_largest(name: str, largest: int) -> None:
    x = torch.tensor([-1.0, 1.0, 0.5 / largest, 1.5 / largest, 0.0]) * largest
    assert torch.equal(round_to(x, name), torch.tensor([-largest, largest, 0.0, 2.0, 0.0]))
    assert torch.equal(round_to(torch.zeros(3), name), torch.zeros(3))


@pytest.mark.parametrize("name", ELEMENT_FORMATS)
def test_beyond_the_range_saturates_and_nan_stays(name: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 3.4e38, torch.nan], dtype=torch.float64)
    got = round_to(x, name)
    largest = FORMATS[name].max
    assert got[:2].tolist() == [largest, -largest]
    assert got[3].isnan()


@pytest.mark.parametrize("name", REFERENCES)
def test_fp64_rounds_once(name: str) -> None:
    fmt = FORMATS[name]
    tie = 1.0 + 2.0 ** -(fmt.mantissa_bits + 1)
    # In fp32 these are the tie itself, which goes down to even.
    x = torch.tensor([tie * (1 + 2.0**-40), tie, tie * (1 - 2.0**-40), -tie * (1 + 2.0**-40)], dtype=torch.float64)
    up = 1.0 + 2.0**-fmt.mantissa_bits
    assert round_to(x, name).tolist() == [up, 1.0, 1.0, -up]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_and_shape_are_kept_and_rounding_twice_changes_nothing(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 33, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    once = round_to(x, name)
    assert (once.dtype, once.shape) == (x.dtype, x.shape)
    assert once.isfinite().all()
    if name not in ("nvfp4", "int8", "int4"):  # their scales move when the largest value does
        assert torch.equal(round_to(once, name), once)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_16_bit_number_never_becomes_infinite(name: str, dtype: torch.dtype) -> None:
    x = torch.full((16,), torch.finfo(dtype).max, dtype=dtype)
    assert round_to(x, name).isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_scalars_and_empty_tensors(name: str) -> None:
    assert round_to(torch.tensor(1.0), name) == 1.0
    assert round_to(torch.empty(2, 0), name).shape == (2, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's own import
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_traces_in_one_graph_with_the_same_bits(name: str, backend: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)) * 100
    compiled = torch.compile(round_to, fullgraph=True, backend=backend)
    assert_same_bits(compiled(x, name), round_to(x, name).numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_agrees_with_itself(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.name == name == str(fmt) == get_format(name).name
    # tf32 takes 32 bits of memory; its name counts the ones it uses.
    assert fmt.bits == fmt.exponent_bits + fmt.mantissa_bits + 1
    assert fmt.smallest_subnormal <= fmt.smallest_normal < fmt.max
    if fmt.torch_dtype is not None and fmt.torch_dtype.is_floating_point and name != "tf32":
        info = torch.finfo(fmt.torch_dtype)
        assert (info.max, info.smallest_normal) == (fmt.max, fmt.smallest_normal)
        assert info.eps == 2.0**-fmt.mantissa_bits


def test_unknown_format_names_the_closest() -> None:
    with pytest.raises(
        UsageError, match=r"unknown format 'fp8_e4m'. Did you mean 'fp8_e4m3'\? Known formats: fp32, tf32"
    ):
        get_format("fp8_e4m")


def test_integer_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a floating tensor, got torch\.int64"):
        round_to(torch.arange(3), "fp8_e4m3")
