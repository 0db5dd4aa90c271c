"""What FP8 hardware can multiply, as a table."""

import pytest

from autoprec.backends.base import fp8_refusal


@pytest.mark.parametrize(
    ("capability", "architecture", "formats", "reason"),
    [
        ((7, 0), "", ("fp8_e4m3",), "needs compute capability 8.9 or newer, not 7.0"),
        ((8, 6), "", ("fp8_e4m3",), "needs compute capability 8.9 or newer, not 8.6"),
        ((8, 9), "", ("fp8_e4m3", "fp8_e5m2"), ""),
        ((9, 0), "", ("fp8_e4m3", "bf16"), ""),
        ((12, 0), "", ("fp8_e4m3",), ""),
        ((9, 0), "", ("fp8_e4m3fnuz",), "CUDA multiplies fp8_e4m3 and fp8_e5m2, not fp8_e4m3fnuz"),
        # ROCm's capability numbers look like CUDA's and mean nothing of the kind.
        ((9, 0), "gfx90a", ("fp8_e4m3",), "needs an MI300 or newer, not gfx90a"),
        ((9, 4), "gfx942", ("fp8_e4m3fnuz",), ""),
        ((9, 4), "gfx942", ("fp8_e4m3fnuz", "fp8_e5m2"), "gfx942 multiplies fp8_e4m3fnuz, not fp8_e5m2"),
        ((9, 5), "gfx950", ("fp8_e4m3", "fp8_e5m2"), ""),
    ],
)
def test_fp8_hardware(capability: tuple[int, int], architecture: str, formats: tuple[str, ...], reason: str) -> None:
    assert fp8_refusal(capability, architecture, formats) == reason
