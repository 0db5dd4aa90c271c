"""What was measured of a study's plans on their target, and which one holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoprec.atomic import write_text
from autoprec.lower.receipt import Receipt
from autoprec.measure import Environment
from autoprec.plan import Plan
from autoprec.tasks import Task
from autoprec.tune.answers.confirmation import Confirmation
from autoprec.tune.answers.enqueued import Enqueued
from autoprec.tune.answers.row import TrialRow, fields_of
from autoprec.tune.answers.verdict import say_faster, say_no_gain
from autoprec.tune.trials.noise import Noise
from autoprec.tune.trials.outcome import Outcome

SETTLED = "settled.json"


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What was measured of plans on their target.

    Args:
        plan: that holds, with its measured evidence; where none does, the given one, refused by its evidence.
        verdict: the answer in words.
        winner: name of the plan that holds; None where none does.
        trials: one measurement of each plan.
        confirmations: of those that could win.
        receipt: of the model in the plan that holds; None where none does.
        noise: of a loss gap.
        budget: largest allowed loss gap.
        environment: where.
        folder: where the files are.
    """

    plan: Plan
    verdict: str
    winner: str | None
    trials: tuple[TrialRow, ...]
    confirmations: tuple[Confirmation, ...]
    receipt: Receipt | None
    noise: Noise
    budget: float
    environment: Environment
    folder: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "verdict": self.verdict,
            "winner": self.winner,
            "plan": self.plan.to_json(),
            "trials": [row.to_json() for row in self.trials],
            "confirmations": [confirmation.to_json() for confirmation in self.confirmations],
            "noise": self.noise.to_json(),
            "budget": self.budget,
            "environment": self.environment.to_json(),
        }

    def save(self) -> None:
        """Write ``plan.json``, ``receipt.json`` and ``settled.json`` into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(self.folder / "plan.json")
        documents = {SETTLED: self.to_json()}
        if self.receipt is not None:
            documents["receipt.json"] = self.receipt.to_json()
        for name, document in documents.items():
            write_text(self.folder / name, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def say_settled(
    task: Task,
    budget: float,
    rows: Sequence[TrialRow],
    asked: TrialRow,
    winner: TrialRow | None,
    confirmations: Sequence[Confirmation],
) -> str:
    """The answer in words: the plan that was asked about holds, or why it doesn't, and which one does.

    Args:
        task: that was trained.
        budget: largest allowed gap.
        rows: of all plans.
        asked: the row of the plan that was given.
        winner: the row of the plan that holds; None where none does.
        confirmations: of those that could win.
    """
    if winner is None:
        return say_no_gain(rows, confirmations, budget)
    of_plan = {confirmation.plan_sha256: confirmation for confirmation in confirmations}
    holds = say_faster(winner, of_plan[winner.plan_sha256], budget, task.mode, task.measured)
    if winner.plan_sha256 == asked.plan_sha256:
        return holds
    confirmation = of_plan.get(asked.plan_sha256)
    why = asked.note
    if confirmation is not None:
        why = confirmation.why
    elif not why:
        speed = "it wasn't timed" if asked.speedup is None else f"it reads {asked.speedup.value:.2f} times fp32"
        why = f"{speed}, at a {task.measured} gap of {asked.loss_gap:+.3%}"
    return f"The given plan isn't the answer: {why}. {holds}"


def row_of(number: int, item: Enqueued, outcome: Outcome) -> TrialRow:
    """One measurement of an enqueued plan, as a trial's row."""
    return TrialRow(
        number=number,
        name=item.name,
        plan_sha256=item.plan.sha256,
        formats={},
        scaler=asdict(item.plan.scaler) if item.plan.scaler.enabled else {},
        origin="repeat",
        **fields_of(outcome),
    )
