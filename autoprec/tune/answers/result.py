"""What a study found: the plan, its evidence, and every trial behind it.

The shape of ``result.json`` (:meth:`TuneResult.to_json`), which reports read::

    schema_version   1
    study, task      names
    verdict          the answer in words
    outcome          "faster" | "estimated_faster" | "no_gain"
    budget           largest allowed loss gap, relative
    winner           plan_sha256 of the trial that the plan comes from, or null for fp32
    method           how mixes were proposed
    objective        {kind: "speed" | "loss" | "memory" | "front", …}
    isolation        where trials ran: a process of their own, or why not
    plan             the plan, as plan.json has it
    evidence         the plan's evidence: loss_gap, speedup, control, throughput …
    trials           list of trials (see TrialRow): number, name, plan_sha256, formats {group: format}, scaler {…},
                     low_share, state, loss_gap, speedup {value, low, high, …} | null, control {…} | null,
                     candidate_s, baseline_s, losses, num_skipped, seconds, note, is_confirmed, origin, worker,
                     started, ended, predicted_speedup, predicted_gap
    groups           list of {name, match, choices, rules_choice, flops_share, num_sites}
    problem          what the planner was given: harm and cost of each choice (planner/problem.py), or null
    explanations     per group: what was chosen, its predicted and measured gain and harm, what would change it
    overhead_s       {stage: seconds}: of everything that isn't a trial's own training and timing
    reference        losses of the fp32 run on the trials' batches
    warm_up          losses of the steps that made the checkpoint
    noise            {loss_gap: relative, seeds, steps}: what weights changed by 1e-6 do
    confirmations    list of {plan_sha256, name, loss_gap {…}, gaps, speedup {…}, control {…}, accepted, why}
    environment      device, versions, threads
    settings         task as it was named, target, trials, seed, … of the call

All gaps are relative to the reference loss: 0.005 is half a per cent.  Every figure is measured on ``environment``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.atomic import write_text
from autoprec.lower.receipt import Receipt
from autoprec.measure import Environment
from autoprec.plan import Plan
from autoprec.planner.problem import Problem
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.row import TrialRow

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The answer of a study; see the module for the shape of its JSON.

    Args:
        study, task: names.
        plan: the confirmed plan with its evidence; all fp32 where nothing better was confirmed.
        verdict: the answer in words, with its numbers.
        winner: ``plan_sha256`` of the trial that the plan comes from (without evidence); None where the answer is fp32.
        trials: finished trials in order.
        confirmations: in the order in which they were made.
        receipt: of the model converted with the plan, on a batch of the task; None for fp32.
        reference, warm_up: losses in fp32, on the trials' batches and of the checkpoint's own training.
        noise: relative loss gap that weights changed by 1e-6 make.
        budget: largest allowed loss gap.
        groups: what the trials' formats speak of.
        problem: harm and cost of each choice, known before the first trial; None where nothing priced them.
        explanations: per group, why the plan has what it has; see :mod:`autoprec.tune.answers.explain`.
        overhead_s: seconds of the stages that train and time nothing.
        environment: where all of it was measured.
        settings: of the call.
        folder: where the files are.
    """

    study: str
    task: str
    plan: Plan
    verdict: str
    winner: str | None
    trials: tuple[TrialRow, ...]
    confirmations: tuple[Confirmation, ...]
    receipt: Receipt | None
    reference: tuple[float, ...]
    warm_up: tuple[float, ...]
    noise: dict[str, Any]
    budget: float
    groups: tuple[dict[str, Any], ...]
    environment: Environment
    settings: dict[str, Any]
    folder: Path
    problem: Problem | None = None
    explanations: tuple[dict[str, Any], ...] = ()
    isolation: str = ""
    overhead_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_faster(self) -> bool:
        """Whether the plan beats fp32 beyond the noise."""
        return self.winner is not None

    @property
    def outcome(self) -> str:
        """``faster``, ``no_gain``, or ``estimated_faster`` where the target isn't here."""
        if not self.is_faster:
            return "no_gain"
        return "estimated_faster" if self.plan.evidence.get("kind") == "estimated" else "faster"

    def to_json(self) -> dict[str, Any]:
        confirmed = {c.plan_sha256 for c in self.confirmations if c.accepted and c.is_measured}
        return {
            "schema_version": SCHEMA_VERSION,
            "study": self.study,
            "task": self.task,
            "verdict": self.verdict,
            "outcome": self.outcome,
            "budget": self.budget,
            "winner": self.winner,
            "plan": self.plan.to_json(),
            "evidence": self.plan.evidence,
            "trials": [{**row.to_json(), "is_confirmed": row.plan_sha256 in confirmed} for row in self.trials],
            "groups": list(self.groups),
            "reference": list(self.reference),
            "warm_up": list(self.warm_up),
            "noise": self.noise,
            "confirmations": [confirmation.to_json() for confirmation in self.confirmations],
            "environment": self.environment.to_json(),
            "settings": self.settings,
            "method": self.settings.get("method", ""),
            "objective": {"kind": self.settings.get("objective"), "min_speedup": self.settings.get("min_speedup")},
            "isolation": self.isolation,
            "problem": None if self.problem is None else self.problem.to_json(),
            "explanations": list(self.explanations),
            "overhead_s": self.overhead_s,
        }

    def save(self) -> None:
        """Write ``plan.json``, ``receipt.json`` and ``result.json`` into the folder."""
        self.plan.save(self.folder / "plan.json")
        _write(self.folder / "receipt.json", {"rows": []} if self.receipt is None else self.receipt.to_json())
        _write(self.folder / "result.json", self.to_json())


def _write(path: Path, document: dict[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
