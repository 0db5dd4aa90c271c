"""What a study tells whoever watches it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autoprec.tune.answers.row import TrialRow

Stage = Literal["checkpoint", "costs", "noise", "trials", "confirm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One event.

    Args:
        stage: what is going on.
        done, total: of its steps, seeds, trials or plans; total is None where nobody knows.
        message: one line for a person.
        row: the trial that just ended.
    """

    stage: Stage
    done: int
    total: int | None
    message: str
    row: TrialRow | None = None


OnProgress = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Nobody watches."""
