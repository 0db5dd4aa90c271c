"""One training step done right: scale, accumulate, unscale once, clip, step, update once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from autoprec.errors import TrainingError, UsageError
from autoprec.masters import demote, master_of, promote
from autoprec.plan import ScalerSettings
from autoprec.scaler import BoundedGradScaler, found_non_finite, require_gradients
from autoprec.train.diagnosis import Probe
from autoprec.train.monitor import TrainingMonitor

log = logging.getLogger(__name__)

#: Without a scaler the same path runs at scale 1, which changes no gradient and still finds those that aren't finite.
_NO_SCALING = ScalerSettings(enabled=True, init_scale=1.0, min_scale=1.0, max_scale=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did.

    Args:
        stepped: the parameters moved; False where a gradient wasn't finite.
        grad_norm: of the unscaled gradients before clipping; None without clipping.
    """

    stepped: bool
    grad_norm: float | None = None


class Stepper:
    """Drives backward, scaler and optimizers in the only right order.

    One loss and all optimizers together::

        with Stepper(model, optimizer, scaler=plan.grad_scaler(), accumulate=4, max_norm=1.0) as step:
            for batch in batches:
                step(loss_of(model, batch))         # every 4th call moves the parameters

    Several optimizers with losses of their own (a GAN)::

        step.backward(d_loss), step.step(d_optimizer)
        step.backward(g_loss), step.step(g_optimizer)
        step.update()                               # once, after all of them

    Args:
        model: holds the parameters; for names and diagnosis. Several models go into a ``ModuleList``.
        optimizers: all that are to be stepped.
        scaler: any :class:`torch.amp.GradScaler`; None, or a disabled one, for bf16 and fp32.
        accumulate: backward passes per step; each loss is divided by it, so that a step sees their mean.
        max_norm: clip the joint gradient norm of the optimizers that are stepped together.
        monitor: counts; one with default patience where None.

    Raises:
        TrainingError: an optimizer holds fp16 parameters that are to be trained.
        UsageError: no optimizer, or an argument out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        max_norm: float | None = None,
        monitor: TrainingMonitor | None = None,
    ) -> None:
        if not optimizers or len({id(o) for o in optimizers}) < len(optimizers):
            raise UsageError(f"give the optimizers to step, each once; there are {len(optimizers)}")
        if accumulate < 1 or (max_norm is not None and not max_norm > 0):
            raise UsageError(f"accumulate={accumulate} must be 1 or more, and max_norm={max_norm} above 0 or None")
        _refuse_low_parameters(model, optimizers)
        self.model, self.optimizers = model, optimizers
        self.accumulate, self.max_norm = accumulate, max_norm
        self.monitor = monitor or TrainingMonitor()
        self._own_scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaler = self._own_scaler or BoundedGradScaler(_NO_SCALING, device="cpu")
        self._scale: torch.Tensor | None = None  # of this iteration, from its first backward on
        self._pending = 0  # backward passes since the last step
        self._done: list[Optimizer] = []  # stepped or skipped in this iteration
        self._all_finite = True
        self._probe: Probe | None = None

    def __call__(self, loss: torch.Tensor) -> StepResult | None:
        """Backward; at the end of an accumulation window also step and update.  None inside a window."""
        self.backward(loss)
        return self._finish_window() if self._pending >= self.accumulate else None

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss / accumulate``, scaled.

        Raises:
            TrainingError: the loss isn't a scalar that depends on a trainable parameter.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            what = "depends on no trainable parameter" if loss.numel() == 1 else f"has shape {tuple(loss.shape)}"
            raise TrainingError(f"the loss {what}: give a scalar computed from parameters that need a gradient")
        if self._probe:
            self._probe.watch(loss)
        # a loss in 16 bit would overflow by the scale itself
        loss = loss.float() if loss.dtype.itemsize < 4 else loss
        scaled = self._scaler.scale(loss / self.accumulate)
        if self._scale is None:
            self._scale = self._current_scale().clone()
        scaled.backward()
        self._pending += 1

    def step(self, *optimizers: Optimizer) -> StepResult:
        """Unscale, clip and step these optimizers together, or all; then clear their gradients.

        Where a gradient of one isn't finite, all of them are skipped. Waits for the device.

        Raises:
            TrainingError: one has no gradients, was stepped in this iteration, or the scale changed since backward.
        """
        chosen = optimizers or self.optimizers
        self._check_chosen(chosen)
        for optimizer in chosen:
            promote(optimizer)
            self._scaler.unscale_(optimizer)
        finite = not any(found_non_finite(self._scaler, optimizer) for optimizer in chosen)
        norm = self._average_and_clip(chosen) if finite else None
        finite = finite and norm != float("inf")
        for optimizer in chosen:
            if finite:
                self._scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
            demote(optimizer)
        self._done.extend(chosen)
        self._all_finite &= finite
        self._pending = 0
        return StepResult(stepped=finite, grad_norm=norm)

    def update(self) -> None:
        """End the iteration: adjust the scale once, count, and stop a run that is stuck.

        Raises:
            TrainingError: nothing was stepped, or an optimizer still holds scaled gradients.
            NonFiniteError: too many steps in a row were skipped; says where the first such value comes from.
        """
        if not self._done:
            raise TrainingError("update() without a step in this iteration: call step() first")
        for index, optimizer in enumerate(self.optimizers):
            if optimizer not in self._done and _gradients(optimizer):
                raise TrainingError(
                    f"optimizer {index} ({type(optimizer).__name__}) still holds scaled gradients, and update() would "
                    "change their scale: step it first, or drop them by its zero_grad()"
                )
        scale = float(self._current_scale().item())
        self._scaler.update()
        for optimizer in self._done:
            optimizer.zero_grad(set_to_none=True)  # what a later backward of this iteration left there
        self.monitor.record(stepped=self._all_finite, scale=scale, floor=getattr(self._scaler, "min_scale", 1.0))
        self._done, self._all_finite, self._scale = [], True, None
        self._watch_closely()

    def finish(self) -> StepResult | None:
        """Step what an incomplete window has gathered, as the mean of it, and refuse a run that trained nothing.

        Raises:
            NonFiniteError: every step of the run was skipped.
        """
        result = self._finish_window() if self._pending else None
        self._drop_probe()
        self.monitor.check_progress()
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        self._drop_probe()

    def state_dict(self) -> dict[str, Any]:
        """State of scaler and monitor.  Gradients aren't in it: save at the end of a window."""
        scaler = self._own_scaler.state_dict() if self._own_scaler else {}
        return {"scaler": scaler, "monitor": self.monitor.state_dict(), "pending": self._pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the next iteration starts a new window.

        Raises:
            TrainingError: an entry is missing, or there is a scaler here and none in the state.
        """
        if not {"scaler", "monitor"} <= state.keys():
            raise TrainingError("the saved training state lacks 'scaler' or 'monitor': give what state_dict() returned")
        if self._own_scaler:
            self._own_scaler.load_state_dict(state["scaler"])
        elif state["scaler"]:
            log.warning("the saved state has a loss scaler, and this run uses none: its scale is ignored")
        self.monitor.load_state_dict(state["monitor"])
        if state.get("pending"):
            log.warning("saved inside an accumulation window: the gradients of %d passes are lost", state["pending"])
        self._pending, self._done, self._all_finite, self._scale = 0, [], True, None

    def _finish_window(self) -> StepResult:
        result = self.step()
        self.update()
        return result

    def _check_chosen(self, chosen: tuple[Optimizer, ...]) -> None:
        for optimizer in chosen:
            if not any(optimizer is known for known in self.optimizers):
                raise UsageError(
                    f"this {type(optimizer).__name__} wasn't given to the Stepper: {len(self.optimizers)} were"
                )
            if optimizer in self._done:
                raise TrainingError("an optimizer is stepped twice in one iteration: call update() between its steps")
            require_gradients(optimizer, self._explain_no_gradients(optimizer))
        if self._scale is None:
            raise TrainingError("step() without backward(): gradients that this Stepper didn't scale can't be unscaled")
        before, now = self._scale.item(), self._current_scale().item()
        if before != now:
            raise TrainingError(
                f"the scale went from {before:g} to {now:g} between backward and step, so that these gradients mix two "
                "scales: leave the scaler's update() to the Stepper"
            )

    def _explain_no_gradients(self, optimizer: Optimizer) -> str:
        own = {id(p) for p in self.model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return "None of them belongs to the model: the optimizer was built on another copy; build it on this one."
        return ""

    def _average_and_clip(self, chosen: tuple[Optimizer, ...]) -> float | None:
        parameters = [p for optimizer in chosen for p in _gradients(optimizer)]
        if 0 < self._pending < self.accumulate:
            for parameter in parameters:  # the last window of an epoch: the mean of what there is
                if parameter.grad is not None:
                    parameter.grad.mul_(self.accumulate / self._pending)
        if self.max_norm is None:
            return None
        return float(nn.utils.clip_grad_norm_(parameters, self.max_norm).item())

    def _current_scale(self) -> torch.Tensor:
        scale = self._scaler._scale
        return torch.tensor(self._scaler.get_scale()) if scale is None else scale

    def _watch_closely(self) -> None:
        finding = self._probe.finding if self._probe else None
        self._drop_probe()
        if self.monitor.is_stuck:
            raise self.monitor.stuck_error(finding)
        if self.monitor.is_nearly_stuck:
            self._probe = Probe(self.model)

    def _drop_probe(self) -> None:
        if self._probe:
            self._probe.remove()
        self._probe = None


def _gradients(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _refuse_low_parameters(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]
    # level O2 keeps fp32 masters, on which gradients are unscaled and the optimizer steps
    trained = [p for p in trained if master_of(p) is None]
    half = [names.get(id(p), f"one of shape {tuple(p.shape)}") for p in trained if p.dtype == torch.float16]
    if half:
        raise TrainingError(
            f"{len(half)} trainable parameters are stored in fp16: {_some(half)}. Their gradients can't be unscaled, "
            "and Adam's eps of 1e-8 is 0 there. Store them in fp32 and let autoprec.convert cast at run time "
            "(level O1), or have it store them with fp32 masters (level O2)"
        )
    low = [names.get(id(p), f"one of shape {tuple(p.shape)}") for p in trained if p.dtype == torch.bfloat16]
    if low:
        log.warning(
            "%d trainable parameters are stored in bf16: %s. Without fp32 masters, which level O2 keeps, an update "
            "below 0.4%% of a weight is lost in rounding",
            len(low),
            _some(low),
        )


def _some(names: list[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
