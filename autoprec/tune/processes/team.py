"""The processes of a ``torchrun`` job as one team: a leader that says what is done, and one word on what went wrong.

Orders go over a group of their own, so that a trial that breaks the group of the models' gradients doesn't break them.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

#: Makes a rank's model part of the team's: ``(model, group) → model``.
Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]

#: Followers wait as long as the leader thinks; a gradient that doesn't come in this time is a failure.
_PATIENCE, _STEP_LIMIT = datetime.timedelta(days=1), datetime.timedelta(minutes=10)
_ORDER_LENGTH = 6


class Failure(NamedTuple):
    """What a rank raised.

    Args:
        order: among the ranks' failures: the first one is the cause of the others.
        rank: whose.
        error: in words.
    """

    order: int
    rank: int
    error: str


def is_distributed() -> bool:
    """Whether this process is one of several that ``torchrun`` started."""
    return dist.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_leader() -> bool:
    """Whether this process runs the study: rank 0 does, and alone it is rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def data_parallel(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The model under torch's ``DistributedDataParallel``."""
    if not any(param.requires_grad for param in model.parameters()):
        return model
    return DistributedDataParallel(model, process_group=group)


class Team:
    """This process's place in the team.

    Made by all ranks at about the same time.

    Args:
        device: that this rank trains on; of several GPUs in a host each rank takes its own.
        wrap: makes a rank's model part of the team's.
    """

    def __init__(self, device: torch.device, wrap: Wrap) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._backend = dist.get_default_backend_for_device(device)
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            dist.init_process_group(backend="gloo", timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._wrap = wrap
        self._orders = _new_group("gloo", _PATIENCE)
        self._num_groups = 0
        self._failure: Failure | None = None
        self._gradients: dist.ProcessGroup | None = None
        self._models: dict[int, nn.Module] = {}
        self._open()

    def _open(self) -> None:
        self._num_groups += 1
        self._gradients = _new_group(self._backend, _STEP_LIMIT)

    def tell(self, *order: int) -> None:
        """Send an order, as the leader."""
        buffer = torch.zeros(_ORDER_LENGTH, dtype=torch.int64)
        buffer[: len(order)] = torch.tensor(order)
        dist.broadcast(buffer, src=0, group=self._orders)

    def hear(self) -> list[int]:
        """The leader's next order, filled up with zeros."""
        buffer = torch.zeros(_ORDER_LENGTH, dtype=torch.int64)
        dist.broadcast(buffer, src=0, group=self._orders)
        return buffer.tolist()

    def share(self, value: Any = None) -> Any:
        """The leader's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._orders)
        return box[0]

    def mean(self, value: float) -> float:
        """Over the ranks."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._orders)
        return float(total) / self.size

    def join(self, number: int, model: nn.Module) -> None:
        """Make this rank's model part of the team's, under a number."""
        if self._gradients is not None:
            self._models[number] = self._wrap(model, self._gradients)

    def model(self, number: int) -> nn.Module:
        return self._models[number]

    def leave(self, number: int) -> None:
        """Forget a model."""
        self._models.pop(number, None)

    @property
    def has_failed(self) -> bool:
        """This rank failed since the last :meth:`check`."""
        return self._failure is not None

    def fail(self, error: Exception) -> None:
        """Take note of an exception, and leave the gradients' group, so that nobody waits there for this rank.

        What its frames hold is let go: models keep the group open.
        """
        if self._failure is None:
            order = _get_default_store().add(f"autoprec/failures/{self._num_groups}", 1)
            self._failure = Failure(order, self.rank, f"{type(error).__name__}: {str(error)[:500]}")
        traceback.clear_frames(error.__traceback__)
        self._close()

    def _close(self) -> None:
        self._models.clear()
        gc.collect()
        group, self._gradients = self._gradients, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # broken already
                dist.destroy_process_group(group)

    def check(self) -> Failure | None:
        """What went wrong first since the last check, on any rank; all are ready for new models then.

        Called by all ranks at the same order.
        """
        found: list[Failure | None] = [None] * self.size
        dist.all_gather_object(found, self._failure, group=self._orders)
        failures = [failure for failure in found if failure is not None]
        if not failures:
            return None
        self._close()
        self._failure = None
        self._open()
        return min(failures)

    def disband(self) -> None:
        """The end, for all ranks; a script's own process group stays."""
        dist.barrier(group=self._orders)
        self._close()
        if self._is_ours:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(self._orders)


def _new_group(backend: str, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group of all ranks; torch's annotation allows for ranks outside it, which get a number."""
    return cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=timeout))
