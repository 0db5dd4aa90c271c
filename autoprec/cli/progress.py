"""A study's progress on stderr: bars on a terminal, one line a trial elsewhere."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from autoprec.cli.console import Output

if TYPE_CHECKING:
    from autoprec.tune.progress import Progress as Event

_STAGES = {
    "checkpoint": "training the checkpoint",
    "costs": "scoring and pricing",
    "noise": "measuring the noise",
    "trials": "trials",
    "confirm": "confirming",
}


class ProgressView:
    """Shows the events of a study; give it to :func:`autoprec.tune` as ``on_progress``."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._stages: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[message]}", markup=False),
            console=output.err,
            disable=not output.shows_progress,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, event: "Event") -> None:
        """Show one event."""
        is_new = event.stage not in self._stages
        if is_new:
            description = _STAGES.get(event.stage, event.stage)
            self._stages[event.stage] = self._bars.add_task(description, total=event.total, message="")
        self._bars.update(self._stages[event.stage], completed=event.done, total=event.total, message=event.message)
        # a log file gets a line for what matters; single steps of a training are no news there
        if not self.output.shows_progress and (is_new or event.row or event.stage != "checkpoint"):
            self.output.note(event.message)
