"""Find the fastest mix whose loss holds, by training for real on the device in this machine."""

from autoprec.tune.answers.result import Confirmation, TrialRow, TuneResult
from autoprec.tune.progress import OnProgress, Progress
from autoprec.tune.search import tune

__all__ = ["Confirmation", "OnProgress", "Progress", "TrialRow", "TuneResult", "tune"]
