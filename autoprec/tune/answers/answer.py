"""From measured trials to the answer: which may win, which of them holds on fresh data, and what is written down."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoprec.convert import convert, receipt
from autoprec.lower.receipt import Receipt
from autoprec.measure import describe_environment
from autoprec.plan import Plan
from autoprec.tune.answers.confirm import NUM_SEEDS, SCRATCH_LIMIT_S, Confirmer
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.enqueued import Enqueued, Front
from autoprec.tune.answers.explain import explain
from autoprec.tune.answers.result import TuneResult
from autoprec.tune.answers.row import TrialRow
from autoprec.tune.answers.verdict import make_evidence, say_faster, say_no_gain, say_smaller
from autoprec.tune.prepared import Prepared
from autoprec.tune.processes.worker import WorkerBench
from autoprec.tune.progress import OnProgress, Progress
from autoprec.tune.request import Request
from autoprec.tune.sampling.objective import Belief
from autoprec.tune.sampling.plan_sampler import PlanSampler
from autoprec.tune.sampling.sampler import plan_sampler
from autoprec.tune.space import Space
from autoprec.tune.trials.bench import Bench
from autoprec.tune.trials.speed import say_times


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Finds and writes the answer of a study.

    Args:
        request: the call.
        prepared: the study.
        rows: its finished trials.
        progress: told of each confirmation.
    """

    request: Request
    prepared: Prepared
    rows: Sequence[TrialRow]
    progress: OnProgress

    def find(self) -> TuneResult:
        """Confirm the best candidate, and write the files of the result."""
        candidates = self._shortlist()
        winner, confirmations = self._confirm(candidates)
        result = self._result(winner, confirmations)
        result.save()
        if not self.request.place.is_here or self.request.objective.kind == "front":
            self._front(candidates).save(self.request.folder)
        return result

    def _sampler(self) -> PlanSampler:
        """What all trials say together."""
        prepared, request = self.prepared, self.request
        return plan_sampler(
            prepared.space,
            request.budget,
            prepared.noise.sigma,
            problem=prepared.problem,
            objective=request.objective,
        )

    def _beliefs(self) -> dict[int, Belief]:
        return self._sampler().posterior(self.prepared.study.get_trials(deepcopy=False))

    def _explanations(self, winner: TrialRow | None) -> tuple[dict[str, Any], ...]:
        prepared = self.prepared
        trials = prepared.study.get_trials(deepcopy=False)
        mix = None if winner is None else winner.formats
        objective = self.request.objective
        return explain(prepared.space, prepared.problem, self.rows, trials, self._sampler(), mix, objective)

    def _shortlist(self) -> list[TrialRow]:
        """Trials that may be the answer, the likely best first."""
        believed = self._beliefs()
        fit: dict[str, TrialRow] = {}
        for row in self.rows:
            belief = believed.get(row.number)
            if belief is None or row.state != "complete" or set(row.formats.values()) == {"fp32"}:
                continue
            if belief.speedup > 1:
                fit.setdefault(row.plan_sha256, row)
        beliefs = {sha: believed[row.number] for sha, row in fit.items()}
        low = next((row for row in fit.values() if row.name == self.prepared.space.low_format), None)
        fallback = 1.0 if low is None else believed[low.number].speedup
        order = self.request.objective.shortlist(beliefs, self.prepared.noise.sigma, fallback)
        return [fit[sha] for sha in order]

    def _confirm(self, candidates: Sequence[TrialRow]) -> tuple[TrialRow | None, list[Confirmation]]:
        prepared = self.prepared
        baseline = next((row for row in candidates if row.name == prepared.space.low_format), None)
        confirmer = Confirmer(
            bench=prepared.bench,
            noise=prepared.noise.sigma,
            steps=min(100, 2 * prepared.bench.effort.steps),
            rounds=max(15, prepared.bench.effort.rounds),
            must_be_faster=self.request.objective.kind != "memory",
        )
        num_ended = 0

        def on_attempt(row: TrialRow, confirmation: Confirmation | None) -> None:
            nonlocal num_ended
            message = f"confirming trial {row.number} on fresh data"
            if confirmation is not None:
                num_ended += 1
                message = f"trial {row.number} again: {say_times(confirmation.speedup)}x fp32; {confirmation.why}"
            self.progress(Progress(stage="confirm", done=num_ended, total=None, message=message))

        return confirmer.choose(candidates, baseline, lambda row: plan_of(prepared.space, row), on_attempt)

    def _result(self, winner: TrialRow | None, confirmations: Sequence[Confirmation]) -> TuneResult:
        request, prepared, bench = self.request, self.prepared, self.prepared.bench
        environment = describe_environment(request.place.device)
        noise, chosen = prepared.noise.to_json(), None
        if winner is None:
            plan = prepared.space.plan_of(prepared.space.baselines()["fp32"])
            verdict = say_no_gain(self.rows, confirmations, request.budget)
        else:
            chosen = next(c for c in confirmations if c.accepted and c.plan_sha256 == winner.plan_sha256)
            plan = plan_of(prepared.space, winner)
            verdict = say_faster(winner, chosen, request.budget, request.task.mode, request.task.measured)
            if request.objective.kind == "memory":
                verdict = f"{say_smaller(winner, self.rows)} {verdict}"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        elsewhere = request.place.elsewhere
        evidence = make_evidence(request.task, chosen, noise, request.budget, environment, now, elsewhere)
        return TuneResult(
            study=request.name,
            task=request.task.name,
            plan=replace(plan, evidence=evidence),
            verdict=verdict,
            winner=None if winner is None else winner.plan_sha256,
            trials=tuple(self.rows),
            confirmations=tuple(confirmations),
            receipt=self._receipt(plan),
            reference=tuple(bench.reference(bench.data_seed, bench.effort.steps)),
            warm_up=bench.checkpoint.losses,
            noise=noise,
            budget=request.budget,
            groups=tuple(asdict(group) for group in prepared.space.groups),
            environment=environment,
            settings=self._settings(),
            folder=request.folder,
            problem=prepared.problem,
            explanations=self._explanations(winner),
            isolation=prepared.isolation,
            overhead_s={name: round(seconds, 2) for name, seconds in prepared.overhead_s.items()},
        )

    def _receipt(self, plan: Plan) -> Receipt | None:
        if plan.level == "O0":
            return None
        bench, task = self.prepared.bench, self.request.task
        model = bench.trainer(None).model
        batch = bench.batches(bench.data_seed, bench.effort.steps)[0]
        there = plan if self.request.place.is_here else bench.estimator().as_there(plan)
        return receipt(convert(model, plan=there, example_inputs=lambda model: task.loss(model, batch)))

    def _settings(self) -> dict[str, Any]:
        bench = self.prepared.bench
        return {
            **self.request.settings(),
            "checkpoint": bench.checkpoint.origin,
            "effort": asdict(bench.effort),
            "pricing_notes": list(self.prepared.notes),
            "throughput": dict(zip(("unit", "per_step"), self.request.task.throughput_unit(), strict=True)),
            "seconds": round(time.monotonic() - self.request.started, 1),
        }

    def _front(self, candidates: Sequence[TrialRow]) -> Front:
        """What ``autoprec tune --confirm`` measures on the target."""
        request, space = self.request, self.prepared.space
        return Front(
            plans=tuple(Enqueued(name=row.name, plan=plan_of(space, row), loss_gap=row.loss_gap) for row in candidates),
            baseline=space.plan_of(space.baselines()[space.low_format]),
            task=request.spec or request.task.name,
            seed=request.seed,
            max_loss_increase=request.budget,
            target=request.place.target.name,
        )


def plan_of(space: Space, row: TrialRow) -> Plan:
    """The plan that a trial measured."""
    scaler = {f"scaler.{name}": value for name, value in row.scaler.items()}
    return replace(space.plan_of({**row.formats, **scaler}), recipe=dict(row.recipe))


def confirmation_s(bench: Bench | WorkerBench, step_s: float, from_scratch: bool) -> float:
    """Seconds that two confirmations take, to be kept free of trials."""
    steps = (1 + 2) * NUM_SEEDS * 2 * bench.effort.steps + 2 * 2 * 4 * max(15, bench.effort.rounds)
    return math.ceil(steps * step_s + (SCRATCH_LIMIT_S if from_scratch else 0.0))
