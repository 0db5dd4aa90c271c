"""Confirm a winner: fresh data, more steps, longer timing.

The best of fifty noisy readings is partly luck, so a plan is reported only after a measurement that had no say in
choosing it.  A plan whose loss fails makes the next candidate a safer one; when none is left, the answer is fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from autoprec.measure import Comparison, Measurement
from autoprec.plan import Plan
from autoprec.tune.bench import Bench
from autoprec.tune.result import Confirmation, TrialRow

NUM_SEEDS = 3
MAX_ATTEMPTS = 4
#: Fresh data seeds start so far from the trials'.
_FIRST_SEED = 1000
#: One-sided confidence that the true gap is inside the budget.
_CONFIDENCE = 0.84

#: Told of each attempt when it starts, with None, and when it ends.
OnAttempt = Callable[[TrialRow, Confirmation | None], None]


@dataclass(frozen=True, kw_only=True)
class Confirmer:
    """Measures plans again.

    Args:
        bench: as the trials used it.
        noise: root mean square of the gap that chaos alone makes.
        steps: of each data seed.
        rounds: of the timing.
    """

    bench: Bench
    noise: float
    steps: int
    rounds: int

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

        floor = baseline if baseline is not None and attempt(baseline, None).accepted else None
        ceiling, num_attempts = math.inf, 0
        for row in candidates:
            if baseline is not None and row.plan_sha256 == baseline.plan_sha256:
                if floor is not None:
                    break  # the rest is no faster
                continue
            if row.loss_gap >= ceiling or num_attempts == MAX_ATTEMPTS:
                continue
            num_attempts += 1
            confirmation = attempt(row, plan_of(floor) if floor is not None else None)
            if confirmation.accepted:
                return row, done
            if not confirmation.holds_loss:
                ceiling = row.loss_gap
        return floor, done

    def confirm(self, row: TrialRow, plan: Plan, rival: Plan | None) -> Confirmation:
        """Time the plan, train it on fresh data, and time it again.

        Of the two timings, minutes apart where steps are slow, the worse one counts.  A plan that isn't faster isn't
        trained.

        Args:
            row: its trial.
            plan: to confirm.
            rival: a plan that it must not be slower than.
        """
        speed, why = self._time(plan, rival, seed=1)
        if why:
            return _confirmation(row, speed, accepted=False, why=why)
        seeds = [self.bench.seed + _FIRST_SEED + k for k in range(NUM_SEEDS)]
        gaps = [self.bench.gap(plan, seed, self.steps) for seed in seeds]
        if any(map(math.isnan, gaps)):
            why = "diverged on fresh data"
            return _confirmation(row, speed, gaps=gaps, accepted=False, why=why, holds_loss=False)
        gap, upper = self._interval(gaps, speed.speedup)
        if upper > self.bench.budget:
            why = f"the loss gap may be {upper:+.3%} on fresh data"
            return _confirmation(row, speed, gap=gap, gaps=gaps, accepted=False, why=why, holds_loss=False)
        again, why = self._time(plan, rival, seed=2)
        speed = min(speed, again, key=lambda timed: timed.speedup.low)
        return _confirmation(row, speed, gap=gap, gaps=gaps, accepted=not why, why=why or "faster, and the loss holds")

    def _time(self, plan: Plan, rival: Plan | None, seed: int) -> tuple[Comparison, str]:
        """The plan's speed, and why it isn't enough; empty if it is."""
        plans = {"plan": plan} if rival is None else {"plan": plan, "rival": rival}
        speeds = self.bench.speeds(plans, self.rounds, seed=self.bench.seed + seed)
        speed = speeds["plan"]
        if not speed.is_faster:
            return speed, "no faster than fp32 beyond the noise"
        if rival is not None and speeds["rival"].speedup.value > speed.speedup.high:
            return speed, f"slower than the 16-bit baseline ({speeds['rival'].speedup})"
        return speed, ""

    def _interval(self, gaps: Sequence[float], like: Measurement) -> tuple[Measurement, float]:
        """Mean gap with its 95% interval, and its one-sided upper bound."""
        error = max(stdev(gaps), self.noise) / math.sqrt(len(gaps))
        mean, freedom = fmean(gaps), len(gaps) - 1
        half = float(stdtrit(freedom, 0.975)) * error
        gap = Measurement(
            value=mean,
            low=mean - half,
            high=mean + half,
            rounds=len(gaps),
            unit="relative",
            device=like.device,
            versions=like.versions,
        )
        return gap, mean + float(stdtrit(freedom, _CONFIDENCE)) * error


def _confirmation(
    row: TrialRow,
    speed: Comparison,
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
