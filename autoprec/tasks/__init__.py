"""Tasks: what a study trains.  A model, its data, its loss and its optimizer, all built from a seed."""

from autoprec.tasks.load import BUILTIN_TASKS, load_task
from autoprec.tasks.task import Batch, Task

__all__ = ["BUILTIN_TASKS", "Batch", "Task", "load_task"]
