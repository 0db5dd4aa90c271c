"""Peak memory of a call."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def measure_peak_memory(step: Callable[[], object], *, device: torch.device | str = "cpu") -> int:
    """Bytes that ``step`` holds at its peak beyond what was held before it.

    On CUDA the allocator's own peak.  On the CPU the storages of the tensors that ops gave and that still live,
    counted after each op; what a kernel takes and gives back inside one op isn't seen.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveStorages() as live:
        step()
    return live.peak_bytes


class _LiveStorages(TorchDispatchMode):
    """Adds up the storages that ops made.  The C++ storage is asked whether it lives: autograd holds it unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
