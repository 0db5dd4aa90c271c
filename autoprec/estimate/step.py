"""How long one step of a plan takes on a target: the roofline summed over the sites, forward, backward and update."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.analyze import SiteReport
from autoprec.estimate.estimate import Estimate
from autoprec.estimate.flow import FormatsOf, Placed, place
from autoprec.estimate.linear import LinearShape, linear_seconds
from autoprec.estimate.roofline import Roofline, bytes_of
from autoprec.graph.site import Site
from autoprec.plan import Mode
from autoprec.target import Target

#: Bytes a parameter that one Adam step moves in fp32: it reads value, gradient and two moments, and writes three.
ADAM_BYTES = 28

ASSUMPTIONS = (
    "each op takes as long as its arithmetic, its bytes or its launch, whichever is longest, and ops don't overlap",
    "backward is two products for each product forward, and reads and writes twice the bytes of any other op",
    "the loss, data loading and communication aren't counted",
)


def estimate_step(
    rows: Sequence[SiteReport],
    formats_of: FormatsOf,
    target: Target,
    *,
    low: str,
    mode: Mode = "training",
) -> Estimate:
    """Seconds of one step.

    Args:
        rows: of an analysis with example inputs, whose shapes count.
        formats_of: what the plan asks of a site; None where it follows what it reads.
        target: the device.
        low: the plan's 16-bit format, ``fp32`` if it has none.
        mode: ``inference`` is the forward alone.

    Raises:
        TargetError: a peak or the bandwidth isn't known.
    """
    roof = Roofline(target)
    parts: dict[str, float] = {"products": 0.0, "casts": 0.0, "other": 0.0}
    trained: dict[str, int] = {}
    for item in place(rows, formats_of, low):
        kind = "products" if item.site.is_gemm else "other"
        parts[kind] += op_seconds(item, roof, low, mode)
        parts["casts"] += sum(cast_seconds(c.numel, c.source, c.format, roof, mode) for c in item.casts)
        trained[item.site.module] = max(trained.get(item.site.module, 0), item.site.num_params)
    if mode == "training":
        parts["optimizer"] = roof.seconds(ADAM_BYTES * sum(trained.values()))
    return Estimate(value=sum(parts.values()), unit="s", target=target.name, parts=parts, assumptions=ASSUMPTIONS)


def op_seconds(item: Placed, roof: Roofline, low: str, mode: Mode) -> float:
    """Seconds of one step that a site takes, the casts of its weight included and those of its activations not.

    Raises:
        TargetError: a peak or the bandwidth isn't known.
    """
    site = item.site
    if item.is_view:
        return 0.0
    if site.op == "linear" and site.num_params and len(site.input_shapes) > 1:
        return linear_seconds(_linear_shape(site), roof.target, item.formats, low, mode)
    operand = item.formats.input if bytes_of(item.formats.input) >= 2 else low
    num_bytes = item.input_numel * bytes_of(operand) + item.output_numel * bytes_of(item.output)
    num_bytes += site.num_params * bytes_of(operand)
    flops = gemm_flops(site)
    forward = roof.seconds(num_bytes, flops, operand)
    if mode == "inference":
        return forward
    backward = 2 * roof.seconds(num_bytes, flops, operand)
    weights = 2 * roof.seconds(site.num_params * 6) if site.is_gemm and site.num_params and operand != "fp32" else 0.0
    return forward + backward + weights


def cast_seconds(numel: int, source: str, format_name: str, roof: Roofline, mode: Mode) -> float:
    """Seconds of one step that casting an activation takes; each cast forward is one of the gradient backward.

    Raises:
        TargetError: the bandwidth isn't known.
    """
    times = 2 if mode == "training" else 1
    return times * roof.seconds(numel * (bytes_of(source) + bytes_of(format_name)))


def _linear_shape(site: Site) -> LinearShape:
    out_features, in_features = site.input_shapes[1]
    return LinearShape(
        num_tokens=math.prod(site.input_shapes[0][:-1]), in_features=in_features, out_features=out_features
    )


def gemm_flops(site: Site) -> float:
    """FLOPs of one forward; of attention also where torch counts none, as on a CPU."""
    if site.flops or site.op != "scaled_dot_product_attention" or len(site.input_shapes) < 3:
        return float(site.flops)
    query, key, value = site.input_shapes[:3]
    return 2.0 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
