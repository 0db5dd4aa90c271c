"""What a report says, as plain numbers and words; how a result becomes that is in ``read.py``."""

from dataclasses import dataclass, replace
from typing import Literal

#: ``reference`` is the model in fp32, ``baseline`` another whole-model mix, ``candidate`` what the search proposed.
Role = Literal["reference", "baseline", "candidate", "winner"]

#: How much a choice harms, as a share of the loss budget: nothing known, up to a tenth, up to all of it, more.
Heat = Literal["unknown", "low", "inside", "over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number with its 95% confidence interval; the ends are None where none was taken.

    Args:
        value, low, high: the number, and the interval's ends.
        is_estimated: nobody measured it.
    """

    value: float
    low: float | None = None
    high: float | None = None
    is_estimated: bool = False

    def shown(self, digits: int, unit: str = "", *, sign: str = "") -> str:
        """Such as ``1.52× (1.49 to 1.55)``, or ``1.52× (estimated)``; ``sign="+"`` shows a plus too."""
        form = f"{sign}z.{digits}f"
        text = f"{self.value:{form}}{unit}"
        if self.is_estimated:
            return f"{text} (estimated)"
        if self.low is None or self.high is None:
            return text
        return f"{text} ({self.low:{form}} to {self.high:{form}})"

    def spread(self, digits: int, unit: str = "", *, sign: str = "") -> str:
        """Such as ``12.1 ± 0.4%``; the interval's half is what follows the ±."""
        text = f"{self.value:{sign}z.{digits}f}"
        if self.is_estimated:
            return f"{text}{unit} (estimated)"
        half = f" ± {self.half:.{digits}f}" if self.half is not None else ""
        return f"{text}{half}{unit}"

    @property
    def half(self) -> float | None:
        """Of the interval's length."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def is_clear(self) -> bool:
        """Whether it is away from 0 by more than its interval, as far as that is known."""
        return abs(self.value) > (self.half or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial of a study.

    Args:
        number: in the study.
        mix: what ran, in words.
        role: see :data:`Role`.
        outcome: ``complete``, ``stopped``, ``diverged``, ``failed``, ``crashed`` or ``timeout``.
        speedup: throughput over the reference's, paired.
        loss_gap_pct: loss over the reference's in per cent, paired; above 0 is worse; None where it has none.
        predicted_speedup, predicted_gap_pct: what was believed before it was measured.
        memory_mib: a step's peak.
        low_share: part of the matmul and convolution FLOPs that the plan puts below fp32, 0 to 1.
        is_on_front: no trial is both faster and closer in loss.
        settings: of the loss scaler and the recipe, in words.
        num_skipped: steps the loss scaler skipped.
        origin: why it was proposed.
        worker, started, ended: which process ran it, and when, in seconds since the epoch; 0 where unknown.
        seconds: that it took; 0 for a mix that wasn't measured again.
        note: why it failed or was left out.
    """

    number: int
    mix: str
    role: Role
    outcome: str
    speedup: Interval | None = None
    loss_gap_pct: Interval | None = None
    predicted_speedup: float | None = None
    predicted_gap_pct: float | None = None
    memory_mib: Interval | None = None
    low_share: float | None = None
    is_on_front: bool = False
    settings: str = ""
    num_skipped: int = 0
    origin: str = ""
    worker: str = ""
    started: float = 0.0
    ended: float = 0.0
    seconds: float = 0.0
    note: str = ""

    @property
    def end(self) -> str:
        """The outcome, and why where it says."""
        return self.note if self.note.startswith(self.outcome) else ": ".join(filter(None, (self.outcome, self.note)))

    @property
    def is_placed(self) -> bool:
        """Whether it has a place in the picture: one that was stopped ended far from where it may win."""
        return self.outcome == "complete" and self.speedup is not None and self.loss_gap_pct is not None

    @property
    def predicted(self) -> str:
        """Speed and loss gap, such as ``1.40×, +0.120%``."""
        speed = "" if self.predicted_speedup is None else f"{self.predicted_speedup:.2f}×"
        gap = "" if self.predicted_gap_pct is None else f"{self.predicted_gap_pct:+z.3f}%"
        return ", ".join(filter(None, (speed, gap)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationRow:
    """A longer measurement of one plan, on data that no trial has seen.

    Args:
        control: fp32 against itself; None where nothing was timed.
        is_accepted: whether it may be the answer.
        is_chosen: whether it is.
        from_scratch: a run from fresh weights in words; empty where none was made.
    """

    mix: str
    speedup: Interval
    control: Interval | None
    loss_gap_pct: Interval | None
    is_accepted: bool
    is_chosen: bool
    why: str
    from_scratch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one format does in one group, against fp32 there; all in per cent.

    Args:
        format: its name.
        is_chosen: whether the plan has it.
        num_trials: mixes measured with it.
        saving, harm: share of the step saved, and loss gap added, as the trials say; None where none had it.
        predicted_saving, predicted_harm: the planner's, before the trials.
        heat: see :data:`Heat`.
        note: why it has no numbers.
    """

    format: str
    is_chosen: bool
    num_trials: int = 0
    saving: Interval | None = None
    harm: Interval | None = None
    predicted_saving: float | None = None
    predicted_harm: float | None = None
    heat: Heat = "unknown"
    note: str = ""

    @property
    def saves(self) -> str:
        """Such as ``saves 12.1 ± 0.4%``, or ``takes 3.0 ± 0.4% more``; empty where no trial had it."""
        if self.saving is None:
            return ""
        if self.saving.value >= 0:
            return f"saves {self.saving.spread(1, '%')}"
        return f"takes {replace(self.saving, value=-self.saving.value).spread(1, '%')} more"

    @property
    def predicted(self) -> str:
        """Saving and harm, such as ``12.0%, +0.010%``; empty where nothing was predicted."""
        saving = "" if self.predicted_saving is None else f"{self.predicted_saving:z.1f}%"
        harm = "" if self.predicted_harm is None else f"{self.predicted_harm:+z.3f}%"
        return ", ".join(filter(None, (saving, harm)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """Sites that share a format.

    Args:
        group: its name.
        size: number of sites and share of the FLOPs, in words.
        chosen: its format.
        saving, harm: of the chosen format, in per cent: as the trials say, else as predicted.
        saving_share, harm_share: parts of what all groups save and harm, 0 to 1; None where it isn't clear.
        sentence: what would change the choice.
        cells: by format, each in its column's place.
    """

    group: str
    size: str
    chosen: str
    saving: Interval | None
    harm: Interval | None
    saving_share: float | None
    harm_share: float | None
    sentence: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One of the few figures that stand at the top."""

    name: str
    figure: str
    detail: str = ""


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
        headlines: what was chosen, how fast, at what loss, and what held it back.
        facts: name and text of the numbers behind the verdict.
        is_measured: False where the speed is an estimate.
        budget_pct: loss gap that was allowed.
        saved: what the groups' savings are shares of.
        formats: columns of the groups' cells.
        groups: in the model's order, the user's pins first.
        trials: by number.
        confirmations: in the order in which they were made.
        sites: in the model's order.
        curves: the reference first.
        method: how it was searched and measured: name and text.
        notes: what couldn't be priced, and what was taken instead.
        environment: name and text.
        command: reproduces the study.
        settled: what was measured on the target since, where it wasn't here; empty where nothing was.
    """

    study: str
    verdict: str
    headlines: tuple[Headline, ...]
    facts: tuple[tuple[str, str], ...]
    is_measured: bool
    budget_pct: float | None
    saved: str
    formats: tuple[str, ...]
    groups: tuple[GroupRow, ...]
    trials: tuple[TrialRow, ...]
    confirmations: tuple[ConfirmationRow, ...]
    sites: tuple[SiteRow, ...]
    curves: tuple[Curve, ...]
    method: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    command: str
    settled: str = ""

    @property
    def kind(self) -> str:
        """Whether the speed is measured, in words."""
        return "measured on this device" if self.is_measured else "speed estimated, unconfirmed"
