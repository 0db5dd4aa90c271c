"""Time and memory of a device that isn't here, by roofline: always an :class:`Estimate`, never a measurement."""

from autoprec.estimate.estimate import Estimate
from autoprec.estimate.linear import LinearShape, linear_gain, linear_seconds
from autoprec.estimate.roofline import Roofline

__all__ = ["Estimate", "LinearShape", "Roofline", "linear_gain", "linear_seconds"]
