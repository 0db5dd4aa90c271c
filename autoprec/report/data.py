"""What a report says, as plain numbers and words; how a result becomes that is in ``read.py``."""

from dataclasses import dataclass
from typing import Literal

#: ``reference`` is the model in fp32, ``baseline`` another whole-model mix, ``candidate`` what the search proposed.
Role = Literal["reference", "baseline", "candidate", "winner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number with its confidence interval, 95% unless said otherwise; the ends are None where none was taken."""

    value: float
    low: float | None = None
    high: float | None = None

    def shown(self, digits: int, unit: str = "") -> str:
        """Such as ``1.52× (1.49–1.55)``."""
        text = f"{self.value:.{digits}f}{unit}"
        if self.low is None or self.high is None:
            return text
        return f"{text} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial of a study.

    Args:
        number: in the study.
        mix: what ran, in words.
        role: see :data:`Role`.
        outcome: ``complete``, ``stopped``, ``diverged`` or ``failed``.
        speedup: throughput over the reference's, paired.
        loss_gap_pct: loss over the reference's in per cent, paired; above 0 is worse; None where it has none.
        low_share: part of the matmul and convolution FLOPs that the plan puts below fp32, 0 to 1.
        is_on_front: no trial is both faster and closer in loss.
        note: why it failed or was left out.
    """

    number: int
    mix: str
    role: Role
    outcome: str
    speedup: Interval | None = None
    loss_gap_pct: Interval | None = None
    low_share: float | None = None
    is_on_front: bool = False
    note: str = ""

    @property
    def end(self) -> str:
        """The outcome, and why where it says."""
        return self.note if self.note.startswith(self.outcome) else ": ".join(filter(None, (self.outcome, self.note)))

    @property
    def is_placed(self) -> bool:
        """Whether it has a place in the picture: one that was stopped ended far from where it may win."""
        return self.outcome == "complete" and self.speedup is not None and self.loss_gap_pct is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationRow:
    """A longer measurement of one plan, on data that no trial has seen."""

    mix: str
    speedup: Interval
    control: Interval
    loss_gap_pct: Interval | None
    is_accepted: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One site of the chosen plan: what was asked, what it got (empty if it never ran) and why."""

    site: str
    asked: str
    got: str
    why: str
    mechanism: str = ""

    @property
    def is_as_asked(self) -> bool:
        return not self.got or self.asked in ("follow", self.got)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The loss of one trial at each step."""

    label: str
    role: Role
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """All that a report shows, in the order in which it shows it.

    Args:
        study: the study's name.
        verdict: the answer in one sentence.
        facts: name and text of the numbers behind the verdict.
        is_measured: False where the speed is an estimate.
        budget_pct: loss gap that was allowed.
        trials: by number.
        confirmations: in the order in which they were made.
        sites: in the model's order.
        curves: the reference first.
        environment: name and text.
        command: reproduces the study.
    """

    study: str
    verdict: str
    facts: tuple[tuple[str, str], ...]
    is_measured: bool
    budget_pct: float | None
    trials: tuple[TrialRow, ...]
    confirmations: tuple[ConfirmationRow, ...]
    sites: tuple[SiteRow, ...]
    curves: tuple[Curve, ...]
    environment: tuple[tuple[str, str], ...]
    command: str
