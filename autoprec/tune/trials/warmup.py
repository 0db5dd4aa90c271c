"""Make a study's checkpoint: load the user's, or train the fp32 model until its loss falls slowly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autoprec.errors import StudyError, TaskError
from autoprec.tasks import Task
from autoprec.tune.trials.checkpoint import Checkpoint, has_settled, load_checkpoint, load_user_weights
from autoprec.tune.trials.trainer import Trainer, to_device

MIN_STEPS, MAX_STEPS = 200, 600

#: Called with steps done and the loss of the last.
OnStep = Callable[[int, float], None]


def obtain_checkpoint(
    task: Task,
    folder: Path,
    *,
    identity: dict[str, Any],
    device: torch.device,
    seed: int,
    limit_s: float,
    on_step: OnStep,
) -> Checkpoint:
    """The checkpoint of a study: the one in its folder, the task's own, or a new one.

    Args:
        task: what to train.
        folder: the study's.
        identity: of the task, see :func:`autoprec.tune.trials.prepare.task_identity`.
        device: where to train.
        seed: of the model and the data.
        limit_s: training stops after so many seconds, whatever the loss does.
        on_step: told of each step.

    Raises:
        StudyError: the folder holds the checkpoint of another task, or the loss isn't finite in fp32.
        TaskError: the task's own checkpoint can't be used, or a step raised.
    """
    saved = load_checkpoint(folder)
    if saved is not None:
        differing = [
            f"{key} {saved.identity.get(key)!r}, here {identity[key]!r}"
            for key in identity
            if saved.identity.get(key) != identity[key]
        ]
        if differing:
            raise StudyError(
                f"{str(folder)!r} holds the checkpoint of another study: {'; '.join(differing)}. Name this one "
                "otherwise (--study NAME, study=) or give it a folder of its own (-o DIR, output_dir=)"
            )
        return saved
    if task.checkpoint is not None:
        checkpoint = load_user_weights(Path(task.checkpoint), task.name)
    elif task.mode == "inference":
        weights = Trainer(task, None, None, device=device, seed=seed).model.state_dict()
        checkpoint = Checkpoint(weights=_to_cpu(weights), origin="the weights that build_model gives")
    else:
        checkpoint = _train(task, device=device, seed=seed, limit_s=limit_s, on_step=on_step)
    checkpoint = replace(checkpoint, identity=identity)
    checkpoint.save(folder)
    return checkpoint


def _train(task: Task, *, device: torch.device, seed: int, limit_s: float, on_step: OnStep) -> Checkpoint:
    trainer = Trainer(task, None, None, device=device, seed=seed)
    stream = task.stream(seed)
    losses: list[float] = []
    start = time.monotonic()
    torch.manual_seed(seed)
    reason = f"the most a warm-up takes is {MAX_STEPS}"
    while len(losses) < MAX_STEPS:
        try:
            losses.append(trainer.finished_step(to_device(next(stream), device)))
        except (RuntimeError, TypeError, ValueError) as exc:
            raise TaskError(
                f"task {task.name!r}: step {len(losses)} in fp32 raised {type(exc).__name__}: {exc}"
            ) from exc
        if losses[-1] != losses[-1]:
            raise StudyError(
                f"task {task.name!r}: the loss is NaN at step {len(losses) - 1} in fp32, before any precision was "
                "lowered; lower the learning rate, or give the task a checkpoint"
            )
        on_step(len(losses), losses[-1])
        if len(losses) >= MIN_STEPS and has_settled(losses):
            reason = "the loss falls less than a fifth as fast as at its start"
            break
        if time.monotonic() - start > limit_s:
            reason = f"the time limit of {limit_s:.0f} s for it"
            break
    optimizer = {} if trainer.optimizer is None else trainer.optimizer.state_dict()
    return Checkpoint(
        weights=_to_cpu(trainer.model.state_dict()),
        optimizer=_to_cpu(optimizer),
        losses=tuple(losses),
        origin=f"trained here for {len(losses)} steps in fp32 ({reason})",
    )


def _to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return tree_map(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, torch.Tensor) else leaf, state)
