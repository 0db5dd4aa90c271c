"""Time and memory of a device that isn't here, by roofline: always an :class:`Estimate`, never a measurement."""

from autoprec.estimate.estimate import Estimate, estimate_from_json
from autoprec.estimate.linear import LinearShape, linear_gain, linear_seconds
from autoprec.estimate.memory import estimate_memory
from autoprec.estimate.roofline import Roofline
from autoprec.estimate.step import estimate_step

__all__ = [
    "Estimate",
    "LinearShape",
    "Roofline",
    "estimate_from_json",
    "estimate_memory",
    "estimate_step",
    "linear_gain",
    "linear_seconds",
]
