"""Tensors that a forward keeps on its module and casts to the dtype it meets: ``self.pe = self.pe.to(x.dtype)``.

In a converted model that dtype may be 16 bit, and a rounded table would stay after revert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

#: FQN of the module, name of the attribute → the fp32 tensor it held at conversion.
Caches = dict[tuple[str, str], torch.Tensor]

_LOW = (torch.bfloat16, torch.float16)


def note_caches(model: nn.Module) -> Caches:
    """The fp32 buffers and plain tensor attributes of the model; nothing is copied."""
    return {key: tensor for _, key, tensor in _kept(model) if tensor.dtype == torch.float32}


def restore_caches(model: nn.Module, noted: Caches) -> None:
    """Gives back those that are 16 bit now, unless the user has put the model itself into 16 bit."""
    if any(parameter.dtype in _LOW for parameter in model.parameters()):
        return
    for module, key, tensor in list(_kept(model)):
        original = noted.get(key)
        if original is not None and tensor.dtype in _LOW:
            setattr(module, key[1], original.to(tensor.device))


def _kept(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str], torch.Tensor]]:
    for fqn, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield module, (fqn, name), value
