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
from autoprec.fingerprint import fingerprint
from autoprec.graph.record import record
from autoprec.measure import describe_environment
from autoprec.probe import cpu_info
from autoprec.rulebook import load_rulebook
from autoprec.target import Target, list_targets, load_target
from autoprec.tasks import Task
from autoprec.tune.space import Space, build_space
from autoprec.tune.trials.checkpoint import Checkpoint
from autoprec.tune.trials.elsewhere import refuse_unknown
from autoprec.tune.trials.trainer import Trainer, take_batches

_ACCELERATORS = {"cuda": "cuda", "rocm": "cuda", "mps": "mps", "hpu": "hpu", "npu": "npu", "mlu": "mlu"}
#: Formats whose gradients no backend computes.
_INFERENCE_ONLY = ("int8", "int4")
#: Formats whose products torch computes on any processor.
_CPU_FORMATS = ("fp32", "bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The target of a study, and the device in this machine that its trials run on.

    Args:
        target: that plans are made for.
        device: that trials run on.
        is_here: the device is the target: speeds are measured.  If not, they are estimated, and losses are measured
            with the target's formats emulated.
        reason: why it isn't here, in words; empty if it is.
    """

    target: Target
    device: torch.device
    is_here: bool = True
    reason: str = ""

    @property
    def elsewhere(self) -> Target | None:
        """The target, if it isn't here: what :class:`~autoprec.tune.trials.bench.Bench` takes."""
        return None if self.is_here else self.target


def find_place(name: str | Target) -> Place:
    """The target, and the device in this machine that stands for it: itself, or one that emulates its formats.

    Raises:
        TargetError: no such target, or it isn't here and its speed can't be estimated.
    """
    target = name if isinstance(name, Target) else load_target(name)
    if target.kind == "cpu":
        device, reason = torch.device("cpu"), _why_other_cpu(target)
    else:
        here = load_target("auto")
        device = torch.device(_ACCELERATORS.get(here.kind, here.kind))
        reason = _why_other_device(target, here)
    if reason:
        refuse_unknown(target)
    return Place(target=target, device=device, is_here=not reason, reason=reason)


def _why_other_device(target: Target, here: Target) -> str:
    """Why the device in this machine isn't the target; empty if it is.  A target of one's own is any of its kind."""
    is_shipped = target.name in {shipped.name for shipped in list_targets()}
    if here.kind == target.kind and (here.name == target.name or not is_shipped):
        return ""
    return f"this machine has {here.title} ({here.name})"


def _why_other_cpu(target: Target) -> str:
    """Why this processor can't stand for a target; empty if it has the target's formats."""
    title, flags = cpu_info()
    missing = [flag for flag in target.cpu_flags if flag not in flags]
    if missing:
        return f"this machine's {title} lacks {', '.join(missing)}"
    strange = [name for name in target.formats if name not in _CPU_FORMATS]
    return f"no processor here multiplies {', '.join(strange)}" if strange else ""


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
        **({} if task.metric is None else {"metric": f"{task.direction} {_name(task.metric)}"}),
    }


def study_identity(task: dict[str, Any], space: Space, place: Place, budget: float) -> dict[str, Any]:
    """What a study is recognised by: its trials are comparable only if all of this is the same."""
    environment = describe_environment(place.device)
    return {
        **task,
        "space": space.describe(),
        "device": f"{environment.device_kind}: {environment.device}",
        "estimated_for": "" if place.is_here else place.target.name,
        "max_loss_increase": budget,
    }


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


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
