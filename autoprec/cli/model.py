"""The model that a command line names: a task's, or what a factory returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import TaskError

if TYPE_CHECKING:
    from torch import nn

    from autoprec.plan import Mode
    from autoprec.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model and how to call it.

    Args:
        spec: as the user named it.
        module: in fp32, on the CPU.
        example_inputs: what :func:`autoprec.convert` takes; None if only a module was given.
        mode: of the task; ``training`` for a factory.
    """

    spec: str
    module: nn.Module
    example_inputs: Any
    mode: Mode = "training"


def load_model(spec: str, seed: int = 0) -> NamedModel:
    """The model that ``spec`` names.

    Args:
        spec: a built-in task, or ``file.py:name`` or ``pkg.mod:name`` of a task, a module, ``(module,
            example_inputs)``, or of a function without arguments that returns one of these.
        seed: of a task's weights and batch, or of torch before a factory is called.

    Raises:
        TaskError: there is no such thing, or it is something else.
    """
    from torch import nn

    from autoprec.tasks import Task

    found = _find(spec)
    if callable(found) and not isinstance(found, nn.Module | type):
        found = _call(spec, found, seed)
    if isinstance(found, Task):
        return _from_task(spec, found, seed)
    if isinstance(found, nn.Module):
        return NamedModel(spec=spec, module=found, example_inputs=None)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
        return NamedModel(spec=spec, module=found[0], example_inputs=found[1])
    raise TaskError(
        f"model {spec!r} is a {type(found).__name__}; wanted an autoprec.Task, a torch.nn.Module, (module, "
        "example_inputs), or a function without arguments that returns one of these"
    )


def _find(spec: str) -> Any:
    from autoprec.tasks import load

    return load.find_object(spec) if ":" in spec else load.load_task(spec)


def _call(spec: str, factory: Callable[[], Any], seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    try:
        return factory()
    except Exception as error:
        raise TaskError(f"model {spec!r}: calling it raised {type(error).__name__}: {error}") from error


def _from_task(spec: str, task: Task, seed: int) -> NamedModel:
    batch = next(task.stream(seed))

    def run(model: nn.Module) -> Any:
        return task.loss(model, batch)

    module = task.build_model(seed)
    if task.checkpoint is not None:
        from autoprec.tune.trials.checkpoint import load_user_weights

        module.load_state_dict(load_user_weights(Path(task.checkpoint), task.name).weights)
    return NamedModel(spec=spec, module=module, example_inputs=run, mode=task.mode)
