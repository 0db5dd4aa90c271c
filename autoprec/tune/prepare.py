"""What a study needs before its first trial: the device, the space of plans, and what the study is recognised by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autoprec.convert import plan_for
from autoprec.errors import TargetError
from autoprec.fingerprint import fingerprint
from autoprec.graph.record import record
from autoprec.measure import describe_environment
from autoprec.rulebook import load_rulebook
from autoprec.target import Target, load_target
from autoprec.tasks import Task
from autoprec.tune.checkpoint import Checkpoint
from autoprec.tune.space import Space, build_space
from autoprec.tune.trainer import Trainer, take_batches

_ACCELERATORS = {"cuda": "cuda", "rocm": "cuda", "mps": "mps", "hpu": "hpu", "npu": "npu", "mlu": "mlu"}
#: Formats whose gradients no backend computes.
_INFERENCE_ONLY = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device that a study measures on."""

    target: Target
    device: torch.device


def find_place(name: str | Target) -> Place:
    """The target's device in this machine.

    Raises:
        TargetError: it isn't here: a study measures, it doesn't estimate.
    """
    target = name if isinstance(name, Target) else load_target(name)
    if target.kind == "cpu":
        return Place(target=target, device=torch.device("cpu"))
    here = load_target("auto")
    if here.kind != target.kind or (not isinstance(name, Target) and here.name != target.name):
        raise TargetError(
            f"tune measures on the device in this machine, which is {here.name!r} ({here.title}), and the target is "
            f"{target.name!r}; run it on a machine that has one, or take target='auto'. A plan by rules needs none: "
            f"autoprec plan --target {target.name}"
        )
    return Place(target=target, device=torch.device(_ACCELERATORS.get(target.kind, target.kind)))


def make_space(
    task: Task,
    checkpoint: Checkpoint,
    place: Place,
    *,
    seed: int,
    keep: Sequence[str] = (),
    rules: Iterable[str | PathLike[str]] = (),
) -> Space:
    """The space of plans for the task's model, from a recorded batch at the checkpoint."""
    model = Trainer(task, checkpoint, None, device=place.device, seed=seed).model
    batch = take_batches(task, seed + 1, 1, place.device)[0]
    rulebook = load_rulebook(*rules)

    def run(model: torch.nn.Module) -> Any:
        return task.loss(model, batch)

    base = plan_for(model, place.target, run, "O1", task.mode, None, rulebook)
    # what fp16 starts from wherever the search puts it, not only where the rules do
    prior = rulebook.scaler_for(sum(param.numel() for param in model.parameters())).settings
    target = place.target
    low = target.low_format if target.low_format != "fp32" else "bf16"
    formats = [name for name in target.formats if task.mode == "inference" or name not in _INFERENCE_ONLY]
    return build_space(
        list(record(model, run).sites.values()),
        replace(base, scaler=prior),
        formats,
        low_format=low,
        keep=keep,
        pins=rulebook.plan_rules,
    )


def task_identity(task: Task, seed: int) -> dict[str, Any]:
    """What a checkpoint is recognised by: the task, its model's structure, its data and the seed."""
    return {
        "task": task.name,
        "mode": task.mode,
        "model": fingerprint(task.build_model(seed))["hash"],
        "data": f"{task.data} {_batch_digest(task, seed + 1)}".strip(),
        "seed": seed,
    }


def study_identity(task: dict[str, Any], space: Space, place: Place, budget: float) -> dict[str, Any]:
    """What a study is recognised by: its trials are comparable only if all of this is the same."""
    environment = describe_environment(place.device)
    return {
        **task,
        "space": space.describe(),
        "device": f"{environment.device_kind}: {environment.device}",
        "max_loss_increase": budget,
    }


def _batch_digest(task: Task, seed: int) -> str:
    """Of the first batch's numbers: the same name may hide other data."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(next(task.stream(seed))):
        if isinstance(leaf, torch.Tensor):
            raw = leaf.detach().cpu().contiguous().view(-1)
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode() + raw.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:12]
