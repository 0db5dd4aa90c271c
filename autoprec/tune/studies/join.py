"""A process joins a study that others began: its trials start from the very same checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from optuna.storages import BaseStorage

from autoprec.errors import StudyError
from autoprec.tune.studies.storage import known_identity

if TYPE_CHECKING:
    from torch import Tensor

#: Key of the digest in a study's identity.
CHECKPOINT = "checkpoint"


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """What a checkpoint's weights are recognised by, in 16 hexadecimal digits."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        raw = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {raw.dtype} {tuple(raw.shape)} ".encode())
        digest.update(raw.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def require_checkpoint(storage: BaseStorage, name: str, folder: Path, *, is_here: bool) -> None:
    """Refuse to train another checkpoint for a study whose trials start from one that isn't here.

    Args:
        storage, name: of the study.
        folder: of the run, where it would lie.
        is_here: whether the folder or the task has one.

    Raises:
        StudyError: with what to do.
    """
    known = known_identity(storage, name)
    if known is not None and CHECKPOINT in known and not is_here:
        raise StudyError(
            f"study {name!r} has trials from checkpoint {known[CHECKPOINT]}, which isn't in {str(folder)!r}. Give all "
            "hosts the same --output-dir on a shared file system, copy the folder's checkpoint files here, or set the "
            "task's checkpoint"
        )
