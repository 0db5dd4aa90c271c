"""The number formats autoprec knows, by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from autoprec.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One number format; for a block format the numbers describe its elements, before their scale.

    Args:
        name: lower-case name, as users write it.
        bits: bits an element takes; a block's scale comes on top.
        exponent_bits: 0 for integers.
        mantissa_bits: stored bits, without the hidden one; for integers all but the sign.
        max: largest finite value; rounding saturates there.
        smallest_normal: smallest positive value with full precision.
        smallest_subnormal: smallest positive value.
        torch_dtype: dtype that stores the elements; None where torch has none.
        block_size: elements that share one scale, along the last dimension; None without blocks.
        scale_format: format of the scale, None for a plain element format.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    torch_dtype: torch.dtype | None
    block_size: int | None = None
    scale_format: str | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether rounding to this format computes a scale from the data."""
        return self.scale_format is not None

    def __str__(self) -> str:
        return self.name


def _floating(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    largest: float,
    bias: int,
    dtype: torch.dtype | None,
    **scale: int | str,
) -> Format:
    smallest_normal = 2.0 ** (1 - bias)
    return Format(
        name=name,
        bits=1 + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max=largest,
        smallest_normal=smallest_normal,
        smallest_subnormal=smallest_normal * 2.0**-mantissa_bits,
        torch_dtype=dtype,
        **scale,  # type: ignore[arg-type]
    )


def _integer(name: str, bits: int, dtype: torch.dtype | None) -> Format:
    # Symmetric: the most negative code is left out, so that -x rounds to minus what x rounds to.
    return Format(
        name=name,
        bits=bits,
        exponent_bits=0,
        mantissa_bits=bits - 1,
        max=float(2 ** (bits - 1) - 1),
        smallest_normal=1.0,
        smallest_subnormal=1.0,
        torch_dtype=dtype,
        scale_format="fp32",
    )


def _widest(mantissa_bits: int) -> float:
    """Largest finite number with fp32's exponent range."""
    return (2.0 - 2.0**-mantissa_bits) * 2.0**127


#: OCP 8-bit floating point 1.0 gives e4m3 and e5m2; OCP microscaling 1.0 gives mxfp8 and e2m1; the fnuz variant has no
#: negative zero and no infinity, and a bias one larger.
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _floating("fp32", 8, 23, _widest(23), 127, torch.float32),
        _floating("tf32", 8, 10, _widest(10), 127, torch.float32),
        _floating("bf16", 8, 7, _widest(7), 127, torch.bfloat16),
        _floating("fp16", 5, 10, 65504.0, 15, torch.float16),
        _floating("fp8_e4m3", 4, 3, 448.0, 7, torch.float8_e4m3fn),
        _floating("fp8_e4m3fnuz", 4, 3, 240.0, 8, torch.float8_e4m3fnuz),
        _floating("fp8_e5m2", 5, 2, 57344.0, 15, torch.float8_e5m2),
        _floating("mxfp8", 4, 3, 448.0, 7, torch.float8_e4m3fn, block_size=32, scale_format="e8m0"),
        _floating("nvfp4", 2, 1, 6.0, 1, None, block_size=16, scale_format="fp8_e4m3"),
        _integer("int8", 8, torch.int8),
        _integer("int4", 4, None),
    )
}


def get_format(name: str) -> Format:
    """The format of that name.

    Raises:
        UsageError: no such format; the message lists all and the closest.
    """
    found = FORMATS.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(str(name), FORMATS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"unknown format {name!r}.{hint} Known formats: {', '.join(FORMATS)}")
