"""Peak memory of a trial's step, and the optimizer's share in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoprec.measure import Measurement, describe_environment

_READINGS = 3


def held_bytes(device: torch.device) -> int:
    """Bytes of tensors on an accelerator now; 0 on a CPU, where nobody counts them."""
    return 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)


def measure_peak(step: Callable[[], object], device: torch.device, held: int) -> Measurement:
    """Bytes of a step at its peak, by torch's own counters; the median of a few with all of them as its interval.

    Args:
        step: one step.
        device: an accelerator.
        held: bytes that were there before what is weighed was built; they don't count.
    """
    readings = []
    for _ in range(_READINGS):
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        torch.accelerator.synchronize(device)
        readings.append(float(torch.accelerator.max_memory_allocated(device) - held))
    readings.sort()
    environment = describe_environment(device)
    return Measurement(
        value=readings[_READINGS // 2],
        low=readings[0],
        high=readings[-1],
        rounds=_READINGS,
        unit="bytes",
        device=environment.device,
        versions={"torch": environment.torch, "python": environment.python},
    )


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> float:
    """Bytes of state that an optimizer keeps for each number it trains; before its first step it has none."""
    if optimizer is None:
        return 0.0
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    state = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    trained = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    return state / trained if trained else 0.0
