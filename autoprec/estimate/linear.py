"""How long one linear layer takes, forward and backward, in 16 bit and below.

With x ``[M, K]``, weight ``[N, K]`` in fp32 and grad ``[M, N]`` there is one product forward and two backward.
Below 16 bit each operand is read for its largest value, read again, and written as codes; for the gradients' products
it is written transposed as well, since tensor cores read 8-bit operands along the contracted dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.estimate.estimate import Estimate
from autoprec.estimate.roofline import Roofline, bytes_of
from autoprec.plan import Formats, Mode
from autoprec.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear layer's work.

    Args:
        num_tokens: rows of its input: all dimensions but the last.
        in_features, out_features: of the layer.
        trains_weight: its weight gets a gradient.
    """

    num_tokens: int
    in_features: int
    out_features: int
    trains_weight: bool = True

    @property
    def flops(self) -> float:
        """Multiply-adds times two of one product."""
        return 2.0 * self.num_tokens * self.in_features * self.out_features


def linear_seconds(shape: LinearShape, target: Target, formats: Formats, low: str, mode: Mode) -> float:
    """Estimated seconds of one step of the layer, casts and kernel launches included.

    Args:
        shape: the layer.
        target: the device.
        formats: of input, weight and grad_output.
        low: the 16-bit format of activations around the layer.
        mode: ``training`` adds the gradients' products; ``inference`` keeps 16-bit weights from call to call, and
            casts narrower ones in each.

    Raises:
        TargetError: a peak or the bandwidth isn't known.
    """
    roof = Roofline(target)
    narrow = bytes_of(formats.input) < 2
    aligned = _pad(shape, target.align(formats.input)) if narrow else shape
    products = _products(aligned, roof, formats, low, mode)
    return products + (_narrow_casts if narrow else _low_casts)(aligned, roof, formats, mode)


def linear_gain(shape: LinearShape, target: Target, formats: Formats, low: str, mode: Mode) -> Estimate:
    """How many times as fast as in 16 bit the layer is in ``formats``.

    Raises:
        TargetError: a peak or the bandwidth isn't known.
    """
    base = linear_seconds(shape, target, Formats.all(low), low, mode)
    seconds = linear_seconds(shape, target, formats, low, mode)
    return Estimate(value=base / seconds, unit="x", target=target.name)


def _pad(shape: LinearShape, multiple: int) -> LinearShape:
    """Kernels pad tokens with rows of zeros; the layer's own dimensions they can't change."""
    tokens = -(-shape.num_tokens // multiple) * multiple
    return LinearShape(
        num_tokens=tokens,
        in_features=shape.in_features,
        out_features=shape.out_features,
        trains_weight=shape.trains_weight,
    )


def _products(shape: LinearShape, roof: Roofline, formats: Formats, low: str, mode: Mode) -> float:
    M, K, N = shape.num_tokens, shape.in_features, shape.out_features
    x, weight, grad = (bytes_of(name) for name in (formats.input, formats.weight, formats.grad_output))
    out = bytes_of(low)
    products = [x * M * K + weight * K * N + out * M * N]
    if mode == "training":
        products.append(grad * M * N + weight * K * N + out * M * K)
        if shape.trains_weight:
            products.append(grad * M * N + x * M * K + out * K * N)
    return sum(roof.seconds(num_bytes, shape.flops, formats.input) for num_bytes in products)


def _low_casts(shape: LinearShape, roof: Roofline, formats: Formats, mode: Mode) -> float:
    """The fp32 weight is cast to 16 bit in each step, and its gradient back."""
    if mode == "inference" or formats.input in ("fp32", "tf32"):
        return 0.0
    weight = shape.in_features * shape.out_features
    num_casts = 2 if shape.trains_weight else 1
    return num_casts * roof.seconds(weight * (4 + bytes_of(formats.weight)))


def _narrow_casts(shape: LinearShape, roof: Roofline, formats: Formats, mode: Mode) -> float:
    M, K, N = shape.num_tokens, shape.in_features, shape.out_features
    training = mode == "training"
    wgrad = training and shape.trains_weight
    seconds = _cast(roof, M * K, 2, bytes_of(formats.input), transposed=wgrad)
    seconds += _cast(roof, K * N, 4, bytes_of(formats.weight), transposed=training)
    if training:
        seconds += _cast(roof, M * N, 2, bytes_of(formats.grad_output), transposed=wgrad)
    if wgrad:
        seconds += roof.seconds(K * N * (2 + 4))  # the weight's gradient to fp32, as after a 16-bit product
    return seconds


def _cast(roof: Roofline, numel: int, source: float, codes: float, *, transposed: bool) -> float:
    amax = roof.seconds(numel * source)
    cast = roof.seconds(numel * (source + codes))
    return amax + cast + (roof.seconds(numel * 2 * codes) if transposed else 0.0)
