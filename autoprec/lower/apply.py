"""Puts a plan into a model's forwards, and takes it out again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.frames.swap import FrameState, framed_methods, original_class, remove, set_frames
from autoprec.graph.site import GEMM_OPS
from autoprec.lower.casts import NUMBER_OPS
from autoprec.lower.foreign import guard_foreign_code
from autoprec.lower.frame import DTYPES, CastFrame, Choice, GemmSettings, frame_for
from autoprec.lower.matching import OpGlob, RuleMatcher
from autoprec.lower.receipt import Receipt
from autoprec.lower.storage import Stored, restore, store
from autoprec.lower.weights import forget
from autoprec.plan import Plan, PlanRule
from autoprec.rulebook import Rulebook

#: Attribute of a converted root that holds its :class:`Conversion`.
CONVERSION = "_autoprec_conversion"


@dataclass
class Conversion:
    """What was done to a model: enough to describe it and to undo it."""

    plan: Plan
    receipt: Receipt
    refused: dict[str, str] = field(default_factory=dict)
    stored: Stored | None = None
    patched: list[tuple[str, str, Any]] = field(default_factory=list)


class FrameBuilder:
    """Makes the frames of a plan; modules under the same rules share one frame object."""

    def __init__(self, plan: Plan, rulebook: Rulebook) -> None:
        self.matcher = RuleMatcher(plan)
        self.settings = GemmSettings(mode=plan.mode, recipe=tuple(sorted(plan.recipe.items())))
        self._mechanics = mechanics(rulebook)
        named = {g.op for g in self._op_globs() if g.op is not None and not set(g.op) & set("*?[")}
        self._ops = sorted(GEMM_OPS | set(rulebook.ops) | named)
        self._frames: dict[tuple[OpGlob, ...], CastFrame] = {}
        self.neutral = frame_for(neutral_choices(rulebook), self.settings)

    def _op_globs(self) -> list[OpGlob]:
        return [g for _, g in self.matcher._wild] + [g for globs in self.matcher._literal.values() for g in globs]

    def frame(self, fqn: str, method: str) -> CastFrame:
        """The frame of one method of one module."""
        relevant = self.matcher.relevant(fqn if method == "forward" else f"{fqn}:{method}")
        if relevant not in self._frames:
            self._frames[relevant] = frame_for(self._choices(relevant), self.settings)
        return self._frames[relevant]

    def _choices(self, relevant: tuple[OpGlob, ...]) -> tuple[tuple[str, int | None, Choice], ...]:
        indices = {(g.op, g.index) for g in relevant if g.op is not None and g.index is not None}
        chosen: list[tuple[str, int | None, Choice]] = []
        for op in self._ops:
            default = self._choice(op, self.matcher.rule(relevant, op))
            if default is not None:
                chosen.append((op, None, default))
            for name, index in indices:
                if name == op:
                    choice = self._choice(op, self.matcher.rule(relevant, op, index))
                    if choice != default:
                        chosen.append((op, index, choice or Choice("widest")))
        return tuple(sorted(chosen, key=lambda c: (c[0], -1 if c[1] is None else c[1])))

    def _choice(self, op: str, rule: PlanRule | None) -> Choice | None:
        if rule is None or rule.formats.input == "follow":
            return self._mechanics.get(op, Choice("widest") if op in GEMM_OPS else None)
        if op in GEMM_OPS:
            return Choice("gemm", rule.formats, rule.backend)
        if rule.formats.input in DTYPES and op not in self._mechanics or rule.formats.input == "fp32":
            return Choice("cast", rule.formats)
        return self._mechanics.get(op)


def mechanics(rulebook: Rulebook) -> dict[str, Choice]:
    """What an op needs whatever the plan says: one dtype for its arguments, range kept, wide positions."""
    choices = {op: Choice("range") for op in NUMBER_OPS}
    for op, rule in rulebook.ops.items():
        if rule.kind == "fixed":
            choices[op] = Choice(rule.dtype or "widest")
        elif rule.guard:
            choices[op] = Choice("factory" if rule.guard == "factory" else "range")
    return choices


def neutral_choices(rulebook: Rulebook) -> tuple[tuple[str, int | None, Choice], ...]:
    """What code outside the plan (hooks, adapters added later) runs in: no format, only ops that agree with themselves."""
    choices = {**mechanics(rulebook), **{op: Choice("widest") for op in GEMM_OPS}}
    return tuple((op, None, choice) for op, choice in sorted(choices.items()))


def apply(model: nn.Module, plan: Plan, rulebook: Rulebook) -> Conversion:
    """Puts every module of ``model`` into the frames of ``plan``."""
    builder = FrameBuilder(plan, rulebook)
    conversion = Conversion(plan, Receipt(rows=()))
    restore_outputs = plan.level != "O3"
    states: dict[tuple[Any, ...], FrameState] = {}
    for fqn, module in model.named_modules():
        frames = {name: builder.frame(fqn, name) for name in framed_methods(original_class(module))}
        key = tuple(sorted((name, id(frame)) for name, frame in frames.items()))
        if key not in states:
            states[key] = FrameState(frames, builder.neutral, restore_outputs)
        reason = set_frames(module, states[key])
        if reason is not None:
            conversion.refused[fqn] = reason
    _keep_unfused(model, conversion)
    guard_foreign_code(model)
    if plan.level in ("O2", "O3"):
        dtype = storage_dtype(plan)
        if dtype is not None:
            conversion.stored = store(model, dtype, masters=plan.level == "O2" and plan.mode == "training")
    vars(model)[CONVERSION] = conversion
    return conversion


def storage_dtype(plan: Plan) -> torch.dtype | None:
    """The 16-bit dtype that O2 and O3 store parameters in: that of the plan's first 16-bit rule."""
    for rule in reversed(plan.rules):
        if rule.formats.input in ("bf16", "fp16"):
            return DTYPES[rule.formats.input]
    return None


def _keep_unfused(model: nn.Module, conversion: Conversion) -> None:
    """Switches off the fused encoder layer: under Dynamo it takes the whole layer past the plan, in fp32, in silence."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            conversion.patched.append((fqn, "activation_relu_or_gelu", module.activation_relu_or_gelu))
            module.activation_relu_or_gelu = 0


def undo(model: nn.Module) -> None:
    """Takes a plan out of a model; does nothing if there is none."""
    conversion = vars(model).pop(CONVERSION, None)
    forget(model.parameters())
    for module in model.modules():
        remove(module)
    if conversion is None:
        return
    for fqn, name, value in conversion.patched:
        setattr(model.get_submodule(fqn), name, value)
    if conversion.stored is not None:
        restore(model, conversion.stored)
