"""FLOPs of one call: multiply-adds times two, as torch counts them below autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

#: Kernels that torch counts no FLOPs for.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def count_flops(call: Callable[[], Any]) -> tuple[Any, int]:
    """Runs ``call`` and returns its result with the FLOPs of the matrix products and convolutions in it."""
    mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        out = call()
    return out, int(counter.get_total_flops())


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Of the CPU's fused attention, which torch doesn't count; arguments are shapes (batch, heads, length, width)."""
    *batch_and_heads, queries, width = query
    return 2 * math.prod(batch_and_heads) * queries * key[-2] * (width + value[-1])


def recurrent_flops(op: str, inputs: list[torch.Tensor]) -> int:
    """FLOPs of a recurrent kernel: every weight matrix multiplies at every step of every sequence.

    Args:
        op: canonical op name; 0 for ops that aren't recurrent.
        inputs: the kernel's floating arguments: the sequence, the states, then the weights.
    """
    if op not in _RECURRENT:
        return 0
    steps = inputs[0].numel() // max(inputs[0].shape[-1], 1)
    return 2 * steps * sum(w.numel() for w in inputs[1:] if w.dim() == 2 and isinstance(w, torch.nn.Parameter))
