"""Counts skipped steps, keeps the scale's history, and decides when a run is stuck."""

from __future__ import annotations

from typing import Any

from autoprec.errors import NonFiniteError, TrainingError, UsageError

_COUNTS = ("steps", "skipped", "skipped_in_a_row", "skipped_at_floor")


class TrainingMonitor:
    """What happened to every optimizer step of a run.

    Args:
        patience: so many skipped steps in a row are an error, 2 or more.
        patience_at_floor: so many in a row at the lowest scale are, 2 or more; a lower scale can't help then.

    Raises:
        UsageError: a patience below 2, which would leave no step to look closely at.
    """

    def __init__(self, patience: int = 25, patience_at_floor: int = 3) -> None:
        if min(patience, patience_at_floor) < 2:
            raise UsageError(f"patience={patience} and patience_at_floor={patience_at_floor} must be 2 or more")
        self.patience, self.patience_at_floor = patience, patience_at_floor
        self.steps = 0  # in which the parameters moved
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.skipped_at_floor = 0
        #: (iteration, scale used there) wherever the scale changed.
        self.scales: list[tuple[int, float]] = []

    @property
    def iterations(self) -> int:
        return self.steps + self.skipped

    @property
    def is_stuck(self) -> bool:
        return self.skipped_in_a_row >= self.patience or self.skipped_at_floor >= self.patience_at_floor

    @property
    def is_nearly_stuck(self) -> bool:
        """Whether one more skipped step would make it stuck: time to look closely."""
        nearly = self.skipped_in_a_row >= self.patience - 1 or self.skipped_at_floor >= self.patience_at_floor - 1
        return nearly and not self.is_stuck

    def record(self, *, stepped: bool, scale: float = 1.0, floor: float = 1.0) -> None:
        """Count one iteration.

        Args:
            stepped: the gradients were finite, so that the parameters moved.
            scale: of the loss in this iteration.
            floor: the lowest scale the scaler goes to.
        """
        if not self.scales or self.scales[-1][1] != scale:
            self.scales.append((self.iterations, scale))
        if stepped:
            self.steps += 1
            self.skipped_in_a_row = self.skipped_at_floor = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.skipped_at_floor = self.skipped_at_floor + 1 if scale <= floor else 0

    def stuck_error(self, finding: object | None) -> NonFiniteError:
        """The error of a run that is stuck; ``finding`` says where the first such value comes from."""
        count, scale = self.skipped_in_a_row, self.scales[-1][1]
        cause = (
            f"First: {finding}." if finding else "In the last of them no hook saw where: call autoprec.train.diagnose."
        )
        at_floor = ", so low that overflow by the scale isn't the cause" if self.skipped_at_floor else ""
        return NonFiniteError(
            f"the last {count} optimizer steps (iterations {self.iterations - count} to {self.iterations - 1}) were "
            f"skipped, since a gradient wasn't finite; the loss scale is {scale:g}{at_floor}. {cause} Keep that place "
            "in fp32 in the plan, or repair it: it may fail in fp32 too."
        )

    def check_progress(self) -> None:
        """Refuse to call a run done in which the parameters never moved.

        Raises:
            NonFiniteError: every step was skipped.
        """
        if self.skipped and not self.steps:
            raise NonFiniteError(
                f"all {self.skipped} optimizer steps were skipped, since a gradient wasn't finite at any scale from "
                f"{self.scales[0][1]:g} to {self.scales[-1][1]:g}: nothing was trained. Start with a lower init_scale, "
                "train longer, or call autoprec.train.diagnose to see where it comes from."
            )

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _COUNTS}, "scales": list(self.scales)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a saved state.

        Raises:
            TrainingError: the state lacks an entry.
        """
        missing = {*_COUNTS, "scales"} - state.keys()
        if missing:
            raise TrainingError(f"the monitor's saved state lacks {', '.join(sorted(missing))}: it is damaged")
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.scales = [(int(iteration), float(scale)) for iteration, scale in state["scales"]]
