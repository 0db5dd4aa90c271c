"""``front.json``: the plans of a study whose speeds are estimates, for ``autoprec tune --confirm`` to measure.

The shape of the file::

    schema_version      1
    task                as it was named
    seed                of model and data
    max_loss_increase   largest allowed loss gap, relative
    target              name
    baseline            the plan of the whole model in 16 bit, or null
    plans               list of {name, loss_gap, plan}, the likely fastest first
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.atomic import write_text
from autoprec.errors import PlanFileError
from autoprec.plan import Plan

FRONT = "front.json"
SCHEMA_VERSION = 1
#: More wouldn't be measured in a few minutes.
MAX_PLANS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """A plan that waits for its target.

    Args:
        name: of its trial.
        plan: with or without evidence.
        loss_gap: that its trial measured.
    """

    name: str
    plan: Plan
    loss_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The plans of a study, and what it takes to measure them again.

    Args:
        plans: the likely fastest first.
        baseline: whole-model 16 bit.
        task: as it was named.
        seed: of model and data.
        max_loss_increase: largest allowed loss gap, relative.
        target: name.
    """

    plans: tuple[Enqueued, ...]
    baseline: Plan | None
    task: str
    seed: int
    max_loss_increase: float
    target: str

    def save(self, folder: Path) -> None:
        """Write ``front.json`` into the folder; no more than :data:`MAX_PLANS` plans."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "task": self.task,
            "seed": self.seed,
            "max_loss_increase": self.max_loss_increase,
            "target": self.target,
            "baseline": None if self.baseline is None else self.baseline.to_json(),
            "plans": [
                {"name": item.name, "loss_gap": item.loss_gap, "plan": item.plan.to_json()}
                for item in self.plans[:MAX_PLANS]
            ],
        }
        write_text(folder / FRONT, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load_front(folder: Path) -> Front | None:
    """The front in a folder; None if there is none.

    Raises:
        PlanFileError: the file is damaged, or of a newer version.
    """
    path = folder / FRONT
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["schema_version"] != SCHEMA_VERSION:
            raise PlanFileError(f"its schema_version is {data['schema_version']!r}; this autoprec reads 1")
        return _read(data)
    except (OSError, ValueError, KeyError, TypeError, PlanFileError) as exc:
        raise PlanFileError(
            f"{str(path)!r} can't be read ({exc}): restore it, or delete it to confirm one plan"
        ) from exc


def _read(data: dict[str, Any]) -> Front:
    plans: Sequence[dict[str, Any]] = data["plans"]
    return Front(
        plans=tuple(
            Enqueued(name=str(item["name"]), loss_gap=float(item["loss_gap"]), plan=Plan.from_json(item["plan"]))
            for item in plans
        ),
        baseline=None if data["baseline"] is None else Plan.from_json(data["baseline"]),
        task=str(data["task"]),
        seed=int(data["seed"]),
        max_loss_increase=float(data["max_loss_increase"]),
        target=str(data["target"]),
    )
