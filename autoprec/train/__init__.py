"""Training loops that low precision can't break silently: stepping, monitoring, diagnosis."""

from autoprec.scaler import BoundedGradScaler
from autoprec.train.diagnosis import Finding, Probe, diagnose
from autoprec.train.monitor import TrainingMonitor
from autoprec.train.stepping import Stepper, StepResult

__all__ = ["BoundedGradScaler", "Finding", "Probe", "StepResult", "Stepper", "TrainingMonitor", "diagnose"]
