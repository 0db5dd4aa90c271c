"""What was measured on the device in this machine, and how sure it is."""

from autoprec.measure.environment import Environment, describe_environment
from autoprec.measure.measurement import Comparison, Measurement, measurement_from_json
from autoprec.measure.memory import measure_peak_memory
from autoprec.measure.timing import measure_ratios

__all__ = [
    "Comparison",
    "Environment",
    "Measurement",
    "describe_environment",
    "measure_peak_memory",
    "measure_ratios",
    "measurement_from_json",
]
