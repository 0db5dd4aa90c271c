"""Confirm a winner: fresh data, more steps, longer timing, and once from scratch.

The best of fifty noisy readings is partly luck, so a plan is reported only after a measurement that had no say in
choosing it.  A plan whose loss fails makes the next candidate a safer one; when none is left, the answer is fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from scipy.special import stdtrit

from autoprec.errors import StudyError
from autoprec.measure import Measurement, describe_environment
from autoprec.plan import Plan
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.trials.speed import Speed, is_behind, say_times

if TYPE_CHECKING:
    from autoprec.tune.processes.worker import WorkerBench
    from autoprec.tune.trials.bench import Bench

NUM_SEEDS = 3
MAX_ATTEMPTS = 4
#: Fresh data seeds start so far from the trials'.
FIRST_SEED = 1000
#: Seconds that a run from scratch may take, fp32's beside it included.
SCRATCH_LIMIT_S = 75.0
#: One-sided confidence that the true gap is inside the budget.
_CONFIDENCE = 0.84

#: Told of each attempt when it starts, with None, and when it ends.
OnAttempt = Callable[[TrialRow, Confirmation | None], None]


@dataclass(frozen=True, kw_only=True)
class Confirmer:
    """Measures plans again.

    Args:
        bench: as the trials used it.
        noise: standard deviation of the gap that no plan is to blame for.
        steps: of each data seed.
        rounds: of the timing.
        first_seed: of the fresh data.
        scratch_limit_s: of the run from fresh weights, where the checkpoint was trained here from such; 0 for none.
        must_be_faster: a plan that is only smaller, or only closer in loss, may be the answer where this is False.
    """

    bench: Bench | WorkerBench
    noise: float
    steps: int
    rounds: int
    first_seed: int = FIRST_SEED
    scratch_limit_s: float = SCRATCH_LIMIT_S
    must_be_faster: bool = True

    def choose(
        self,
        candidates: Sequence[TrialRow],
        baseline: TrialRow | None,
        plan_of: Callable[[TrialRow], Plan],
        on_attempt: OnAttempt,
    ) -> tuple[TrialRow | None, list[Confirmation]]:
        """The fastest candidate that holds, but no slower than the 16-bit baseline if that holds.

        Args:
            candidates: that may win, the likely best first.
            baseline: whole-model 16 bit, if it may win.
            plan_of: the plan of a trial.
            on_attempt: told of each attempt.

        Returns:
            the winner, None for fp32, and all confirmations.
        """
        done: list[Confirmation] = []

        def attempt(row: TrialRow, rival: Plan | None) -> Confirmation:
            on_attempt(row, None)
            done.append(self.confirm(row, plan_of(row), rival))
            on_attempt(row, done[-1])
            return done[-1]

        def lasts(row: TrialRow) -> Confirmation:
            """The accepted confirmation of a plan, if it still is after a run from scratch."""
            k = next(k for k, confirmation in enumerate(done) if confirmation.plan_sha256 == row.plan_sha256)
            done[k] = self.confirm_from_scratch(done[k], plan_of(row))
            if not done[k].accepted:
                on_attempt(row, done[k])
            return done[k]

        floor = baseline if baseline is not None and attempt(baseline, None).accepted else None
        ceiling, num_attempts = math.inf, 0
        for row in candidates:
            if baseline is not None and row.plan_sha256 == baseline.plan_sha256:
                if floor is None:
                    continue
                confirmation, floor = lasts(floor), None  # the rest is no faster: here it wins or is out
            elif row.loss_gap >= ceiling or num_attempts == MAX_ATTEMPTS:
                continue
            else:
                num_attempts += 1
                confirmation = attempt(row, plan_of(floor) if floor is not None else None)
                if confirmation.accepted:
                    confirmation = lasts(row)
            if confirmation.accepted:
                return row, done
            if not confirmation.holds_loss:
                ceiling = min(ceiling, row.loss_gap)
        return floor if floor is not None and lasts(floor).accepted else None, done

    def confirm(self, row: TrialRow, plan: Plan, rival: Plan | None) -> Confirmation:
        """Time the plan, train it on fresh data, and time it again.

        Of the two timings, minutes apart where steps are slow, the worse one counts.  A plan that isn't faster isn't
        trained.  An estimated speed doesn't change, and is taken once.

        Args:
            row: its trial.
            plan: to confirm.
            rival: a plan that it must not be slower than.
        """
        try:
            return self._confirm(row, plan, rival)
        except StudyError as exc:  # the plan raised, or ended its process again and again
            return _failed(row, f"it failed when it was timed again: {exc}")

    def _confirm(self, row: TrialRow, plan: Plan, rival: Plan | None) -> Confirmation:
        speed, why = self._time(plan, rival, seed=1)
        if why:
            return _confirmation(row, speed, accepted=False, why=why)
        seeds = [self.bench.seed + self.first_seed + k for k in range(NUM_SEEDS)]
        gaps = [self.bench.gap(plan, seed, self.steps) for seed in seeds]
        if any(map(math.isnan, gaps)):
            why = "diverged on fresh data"
            return _confirmation(row, speed, gaps=gaps, accepted=False, why=why, holds_loss=False)
        gap, upper = self._interval(gaps)
        if upper > self.bench.budget:
            why = f"the loss gap may be {upper:+.3%} on fresh data"
            return _confirmation(row, speed, gap=gap, gaps=gaps, accepted=False, why=why, holds_loss=False)
        if isinstance(speed.speedup, Measurement):
            again, why = self._time(plan, rival, seed=2)
            speed = min(speed, again, key=_lower_end)
        good = "faster, and the loss holds" if speed.control else "faster by an estimate, and the loss holds"
        good = good if self.must_be_faster else "the loss holds"
        return _confirmation(row, speed, gap=gap, gaps=gaps, accepted=not why, why=why or good)

    def confirm_from_scratch(self, confirmation: Confirmation, plan: Plan) -> Confirmation:
        """An accepted confirmation with a run from fresh weights, where the user trains from such; refused if it fails.

        Args:
            confirmation: of the plan.
            plan: to train.
        """
        task = self.bench.task
        trained_here = task.mode == "training" and task.checkpoint is None and self.bench.checkpoint.losses
        if not self.scratch_limit_s or not trained_here:
            return confirmation
        run = self.bench.from_scratch(plan, self.scratch_limit_s)
        confirmation = replace(confirmation, from_scratch=run)
        if run.holds(self.bench.budget):
            return confirmation
        end = "it diverged" if run.gap is None else f"the loss gap is {run.gap:+.3%} (chaos alone: {run.chaos:.3%})"
        why = f"from fresh weights {end} over {run.steps} steps, though it holds from the checkpoint"
        return replace(confirmation, accepted=False, holds_loss=False, why=why)

    def _time(self, plan: Plan, rival: Plan | None, seed: int) -> tuple[Speed, str]:
        """The plan's speed, and why it isn't enough; empty if it is."""
        plans = {"plan": plan} if rival is None else {"plan": plan, "rival": rival}
        speeds = self.bench.speeds(plans, self.rounds, seed=self.bench.seed + seed)
        speed = speeds["plan"]
        if not self.must_be_faster:
            return speed, ""
        if not speed.is_faster:
            beyond = "the noise" if speed.control else "what an estimate may miss"
            return speed, f"no faster than fp32 beyond {beyond}"
        if rival is not None and is_behind(speed, speeds["rival"]):
            how = "slower than" if speed.control else "not surely faster than"
            return speed, f"{how} the 16-bit baseline ({say_times(speeds['rival'].speedup)})"
        return speed, ""

    def _interval(self, gaps: Sequence[float]) -> tuple[Measurement, float]:
        """Mean gap with its 95% interval, and its one-sided upper bound."""
        error = max(stdev(gaps), self.noise) / math.sqrt(len(gaps))
        mean, freedom = fmean(gaps), len(gaps) - 1
        half = float(stdtrit(freedom, 0.975)) * error
        environment = describe_environment(self.bench.device)
        gap = Measurement(
            value=mean,
            low=mean - half,
            high=mean + half,
            rounds=len(gaps),
            unit="relative",
            device=environment.device,
            versions={"torch": environment.torch, "python": environment.python},
        )
        return gap, mean + float(stdtrit(freedom, _CONFIDENCE)) * error


def _lower_end(speed: Speed) -> float:
    return speed.speedup.low if isinstance(speed.speedup, Measurement) else speed.speedup.value


def _failed(row: TrialRow, why: str) -> Confirmation:
    """Refused, with the figures of its trial."""
    if row.speedup is None or row.candidate_s is None or row.baseline_s is None:
        raise StudyError(f"trial {row.number} was never timed, so it can't be confirmed: {why}")
    return Confirmation(
        plan_sha256=row.plan_sha256,
        name=row.name,
        loss_gap=None,
        gaps=(),
        speedup=row.speedup,
        control=row.control,
        candidate_s=row.candidate_s,
        baseline_s=row.baseline_s,
        accepted=False,
        holds_loss=True,
        why=why,
    )


def _confirmation(
    row: TrialRow,
    speed: Speed,
    *,
    accepted: bool,
    why: str,
    gap: Measurement | None = None,
    gaps: Sequence[float] = (),
    holds_loss: bool = True,
) -> Confirmation:
    return Confirmation(
        plan_sha256=row.plan_sha256,
        name=row.name,
        loss_gap=gap,
        gaps=tuple(None if math.isnan(g) else g for g in gaps),
        speedup=speed.speedup,
        control=speed.control,
        candidate_s=speed.candidate_s,
        baseline_s=speed.baseline_s,
        accepted=accepted,
        holds_loss=holds_loss,
        why=why,
    )
