"""A loss scaler with a floor and a ceiling, whose state survives a checkpoint to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autoprec.errors import TrainingError, UsageError
from autoprec.masters import demote, promote
from autoprec.plan import ScalerSettings

_STATE: dict[str, Callable[[Any], bool]] = {
    "scale": lambda v: isinstance(v, float) and math.isfinite(v) and v > 0,
    "growth_factor": lambda v: isinstance(v, float) and math.isfinite(v) and v > 1,
    "backoff_factor": lambda v: isinstance(v, float) and 0 < v < 1,
    "growth_interval": lambda v: isinstance(v, int) and v >= 1,
    "_growth_tracker": lambda v: isinstance(v, int) and v >= 0,
}
_BOUNDS: dict[str, Callable[[Any], bool]] = {"min_scale": _STATE["scale"], "max_scale": _STATE["scale"]}


class BoundedGradScaler(torch.amp.GradScaler):
    """A :class:`torch.amp.GradScaler` that keeps its scale between two bounds.

    torch halves the scale for ever when a gradient is NaN whatever the scale, down to 0, and every step is then skipped
    without an error.  Here the scale stops at ``min_scale``; :class:`autoprec.train.TrainingMonitor` tells the rest.

    Gradients of parameters stored in 16 bit with fp32 masters (level O2) are unscaled on the masters: between
    ``unscale_`` and ``step`` such a parameter is its master.

    Args:
        settings: see :class:`autoprec.plan.ScalerSettings`.
        device: device type of the losses; None is this machine's accelerator, else the CPU.

    Raises:
        UsageError: the settings enable scaling, and this machine has no such device.
    """

    def __init__(self, settings: ScalerSettings, device: str | None = None) -> None:
        device = device or _default_device()
        if settings.enabled and device == "cuda" and not torch.cuda.is_available():
            raise UsageError("a scaler on 'cuda' was asked for, and torch finds no such device: use device='cpu'")
        super().__init__(
            device,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            # a disabled scaler on cuda would warn where there is none
            enabled=settings.enabled,
        )
        self.min_scale, self.max_scale = settings.min_scale, settings.max_scale
        self._promoted: list[torch.optim.Optimizer] = []

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale after a step, as torch does, then bound it; without a transfer from the device."""
        while self._promoted:  # unscaled, and its step left out
            demote(self._promoted.pop())
        super().update(new_scale)
        if self._enabled and self._scale is not None:
            self._scale.clamp_(self.min_scale, self.max_scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once in a step.

        Raises:
            TrainingError: none of its parameters has a gradient, or no loss has been scaled yet.
        """
        if self._enabled:
            require_gradients(optimizer)
            self._require_scale()
            promote(optimizer)
            self._promoted.append(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that wasn't done, then step unless a gradient isn't finite.

        Raises:
            TrainingError: none of its parameters has a gradient, or no loss has been scaled yet.
        """
        if self._enabled:
            require_gradients(optimizer)
            self._require_scale()
        result = super().step(optimizer, *args, **kwargs)
        demote(optimizer)  # where the step was skipped
        return result

    def found_non_finite(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``unscale_`` found a gradient that isn't finite.  Waits for the device."""
        return found_non_finite(self, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Scale, growth count, factors and bounds as Python numbers; empty when disabled."""
        state = super().state_dict()
        return {**state, "min_scale": self.min_scale, "max_scale": self.max_scale} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, of this class or of torch's (whose missing bounds stay as they are here).

        Raises:
            TrainingError: the state is empty, lacks an entry, or one is out of range; the scaler is then unchanged.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise TrainingError(
                "the scaler's saved state is empty: it was saved with scaling disabled; start with a fresh scaler "
                "(expect a few skipped steps), or use the plan the checkpoint was made with"
            )
        given = {**_STATE, **{name: check for name, check in _BOUNDS.items() if name in state_dict}}
        for name, is_fine in given.items():
            if name not in state_dict or not is_fine(state_dict[name]):
                raise TrainingError(f"the scaler's saved state has {name}={state_dict.get(name)!r}: it is damaged")
        super().load_state_dict(state_dict)
        self.min_scale = state_dict.get("min_scale", self.min_scale)
        self.max_scale = state_dict.get("max_scale", self.max_scale)

    def _require_scale(self) -> None:
        if self._scale is None:
            raise TrainingError(
                "gradients are unscaled before any loss was scaled: call scaler.scale(loss).backward() first"
            )


def found_non_finite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether any scaler's ``unscale_`` found a gradient that isn't finite.  Waits for the device."""
    return any(bool(found.item()) for found in scaler._found_inf_per_device(optimizer).values())


def require_gradients(optimizer: torch.optim.Optimizer, why: str = "") -> None:
    """Refuse to step an optimizer none of whose parameters has a gradient.

    Raises:
        TrainingError: naming its parameter groups.
    """
    groups = optimizer.param_groups
    if any(param.grad is not None for group in groups for param in group["params"]):
        return
    sizes = ", ".join(f"group {i}: {len(group['params'])} parameters" for i, group in enumerate(groups))
    raise TrainingError(
        f"no parameter of this {type(optimizer).__name__} has a gradient ({sizes}). "
        + (
            why
            or "Was backward() called, does the loss depend on them, and is the optimizer built on this very model, "
            "not on a copy? An optimizer whose part is frozen must not be stepped."
        )
    )


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"
