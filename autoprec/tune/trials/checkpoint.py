"""The weights and optimizer state that every trial starts from: the task's own, or trained here first.

Short paired runs rank mixes well from a checkpoint and hardly at all from fresh weights, where they rank the draw of
the weights.  Nothing is unpickled: weights are safetensors, the optimizer's state is read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from autoprec.atomic import write_bytes, write_text
from autoprec.errors import StudyError, TaskError

WEIGHTS, OPTIMIZER, CURVE = "checkpoint.safetensors", "checkpoint-optimizer.pt", "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where a run starts.

    Args:
        weights: the model's state dict, on the CPU.
        optimizer: the optimizer's state dict; empty where there is none.
        losses: of the steps that made it; empty for the user's own.
        origin: in words: trained here and for how long, or the user's file.
        identity: of the task it was made for.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    origin: str
    identity: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the three files; the last one written is what makes the checkpoint valid."""
        folder.mkdir(parents=True, exist_ok=True)
        # clones: tied weights share memory, which safetensors refuses
        write_bytes(folder / WEIGHTS, save({name: t.detach().clone().contiguous() for name, t in self.weights.items()}))
        buffer = io.BytesIO()
        torch.save(self.optimizer, buffer)
        write_bytes(folder / OPTIMIZER, buffer.getvalue())
        record = {"losses": list(self.losses), "origin": self.origin, "identity": self.identity}
        write_text(folder / CURVE, json.dumps(record) + "\n")


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint that a study saved; None if it hasn't yet.

    Raises:
        StudyError: its files are damaged.
    """
    if not (folder / CURVE).is_file():
        return None
    try:
        curve = json.loads((folder / CURVE).read_text("utf-8"))
        optimizer = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        return Checkpoint(
            weights=load_file(folder / WEIGHTS),
            optimizer=optimizer,
            losses=tuple(map(float, curve["losses"])),
            origin=str(curve["origin"]),
            identity=dict(curve["identity"]),
        )
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as exc:
        raise StudyError(
            f"the checkpoint in {str(folder)!r} can't be read ({exc}): delete {CURVE} there to train a new one, "
            "and the study with it, since its trials started from the old one"
        ) from exc


def load_user_weights(path: str | Path, task_name: str) -> Checkpoint:
    """The task's own checkpoint.

    Raises:
        TaskError: the file is missing, or is neither safetensors nor a state dict without code.
    """
    path = Path(path)
    if not path.is_file():
        raise TaskError(f"task {task_name!r}: there is no checkpoint {str(path)!r}")
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as exc:
        raise TaskError(
            f"task {task_name!r}: the checkpoint {str(path)!r} can't be read as a state dict: {exc}. Allowed: a "
            ".safetensors file, or what torch.save(model.state_dict(), path) writes"
        ) from exc
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise TaskError(f"task {task_name!r}: the checkpoint {str(path)!r} isn't a state dict of tensors")
    return Checkpoint(weights=weights, origin=f"the task's {path.name}")


def has_settled(losses: Sequence[float], window: int = 25, share: float = 0.2) -> bool:
    """Whether the loss falls less than ``share`` as fast as at its start.

    Both slopes are between the means of two neighbouring windows of steps.
    """
    if len(losses) < 4 * window:
        return False
    means = [sum(losses[k : k + window]) / window for k in (0, window, len(losses) - 2 * window, len(losses) - window)]
    start, end = means[0] - means[1], means[2] - means[3]
    return end < share * start
