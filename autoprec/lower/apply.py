"""Puts a plan into a model's forwards, and takes it out again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.backends.registry import choose, forget_weights
from autoprec.frames.swap import FAST, FrameState, framed_methods, leaf_op, original_class, remove, set_frames
from autoprec.graph.site import GEMM_OPS
from autoprec.lower.caches import Caches, note_caches, restore_caches
from autoprec.lower.casts import NUMBER_OPS
from autoprec.lower.deferred import KINDS
from autoprec.lower.fast.path import FastPath
from autoprec.lower.foreign import guard_foreign_code
from autoprec.lower.frame import CastFrame, Choice, Choices, frame_for
from autoprec.lower.gemm import DTYPES, activation_dtype, needs_backend, settings_of
from autoprec.lower.matching import OpGlob, RuleMatcher
from autoprec.lower.receipt import Receipt
from autoprec.lower.storage import Stored, restore, store
from autoprec.lower.weights import forget
from autoprec.plan import FIXED, FOLLOW, Plan, PlanRule
from autoprec.recipes import recipe_for
from autoprec.rulebook import Rulebook

#: Attribute of a converted root that holds its :class:`Conversion`.
CONVERSION = "_autoprec_conversion"


@dataclass
class Conversion:
    """What was done to a model: enough to describe it and to undo it.

    ``backends`` is by FQN of a layer, ``fusions`` by that of a norm: the layers that run it in one, see
    :func:`autoprec.lower.fusing.find_fusions`.
    """

    plan: Plan
    receipt: Receipt
    refused: dict[str, str] = field(default_factory=dict)
    backends: dict[str, tuple[str, str]] = field(default_factory=dict)
    fusions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unfused: Mapping[str, str] = field(default_factory=dict)
    stored: Stored | None = None
    patched: list[tuple[str, str, Any]] = field(default_factory=list)
    caches: Caches = field(default_factory=dict)


class FrameBuilder:
    """Makes the frames of a plan; modules that do the same share one frame object.

    Args:
        plan: the plan.
        rulebook: what ops need whatever the plan says.
        fusions: FQN of a norm → of the layers that run it in one.
    """

    def __init__(
        self, plan: Plan, rulebook: Rulebook, fusions: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    ) -> None:
        self.plan = plan
        self._fusions = fusions
        self.matcher = RuleMatcher(plan)
        self.settings = settings_of(plan)
        self._mechanics = mechanics(rulebook)
        self._ops = sorted(GEMM_OPS | set(rulebook.ops) | self.matcher.named_ops)
        self._frames: dict[tuple[tuple[OpGlob, ...], tuple[str, ...], int], CastFrame] = {}
        self.neutral = frame_for(neutral_choices(rulebook), self.settings)
        #: FQN of each linear layer below 16 bit → the backend that takes it (or none) and why.
        self.backends: dict[str, tuple[str, str]] = {}

    def frame(self, fqn: str, module: nn.Module, method: str) -> CastFrame:
        """The frame of one method of one module."""
        relevant = self.matcher.relevant(fqn if method == "forward" else f"{fqn}:{method}")
        backend = self._backend(fqn, module, relevant)
        key = relevant, backend, len(self._fusions.get(fqn, ()))
        if key not in self._frames:
            choices = self._choices(relevant, backend)
            if fqn in self._fusions:
                kind = "defer" if len(self._fusions[fqn]) == 1 else "defer_mlp"
                choices = tuple(
                    (op, i, choice._replace(kind=kind) if op in KINDS and choice.kind == "cast" else choice)
                    for op, i, choice in choices
                )
            self._frames[key] = frame_for(choices, self.settings)
        return self._frames[key]

    def _backend(self, fqn: str, module: nn.Module, relevant: tuple[OpGlob, ...]) -> tuple[str, ...]:
        """The backend of a linear layer whose formats need one."""
        rule = self.matcher.rule(relevant, "linear", 0)
        if rule is None or leaf_op(original_class(module)) != "linear":
            return ()
        if not needs_backend(rule.formats, self.plan.mode):
            return ()
        weight: Any = module.weight
        if is_lazy(weight):
            self.backends[fqn] = "", "a lazy layer has no shape before its first call; call the model, then convert it"
            return ()
        x = weight.new_empty((128, weight.shape[1]), dtype=activation_dtype(rule.formats, self.settings))
        recipe = recipe_for((rule.formats.input, rule.formats.weight, rule.formats.grad_output), self.plan.recipe)
        backend, why = choose("linear", rule.formats, x, weight, rule.backend, self.plan.mode, recipe=recipe)
        self.backends[fqn] = ("" if backend is None else backend.name, why)
        return () if backend is None else (backend.name,)

    def _choices(self, relevant: tuple[OpGlob, ...], backend: tuple[str, ...]) -> Choices:
        indices = {(g.op, g.call) for g in relevant if g.op is not None and g.call is not None}
        chosen: list[tuple[str, int | None, Choice]] = []
        for op in self._ops:
            default = self._choice(op, self.matcher.rule(relevant, op), backend)
            if default is not None:
                chosen.append((op, None, default))
            for name, index in indices:
                if name == op:
                    choice = self._choice(op, self.matcher.rule(relevant, op, index), backend)
                    if choice != default:
                        chosen.append((op, index, choice or Choice("widest")))
        return tuple(sorted(chosen, key=lambda c: (c[0], -1 if c[1] is None else c[1])))

    def _choice(self, op: str, rule: PlanRule | None, backend: tuple[str, ...]) -> Choice | None:
        if rule is not None and rule.formats.input == FIXED:
            return self._mechanics.get(op, Choice("widest"))
        if rule is None or rule.formats.input == FOLLOW:
            return self._mechanics.get(op, Choice("widest") if op in GEMM_OPS else None)
        if op in GEMM_OPS:
            return Choice("gemm", rule.formats, backend)
        if (rule.formats.input in DTYPES and op not in self._mechanics) or rule.formats.input == "fp32":
            return Choice("cast", rule.formats)
        return self._mechanics.get(op)


def mechanics(rulebook: Rulebook) -> dict[str, Choice]:
    """What an op needs whatever the plan says: one dtype for its arguments, range kept, wide positions."""
    choices = {op: Choice("range") for op in NUMBER_OPS}
    choices["batch_norm"] = Choice("statistics")
    for op, rule in rulebook.ops.items():
        if rule.kind == "fixed":
            choices[op] = Choice(rule.dtype or "widest")
        elif rule.guard:
            choices[op] = Choice("factory" if rule.guard == "factory" else "range")
    return choices


def neutral_choices(rulebook: Rulebook) -> tuple[tuple[str, int | None, Choice], ...]:
    """What code outside the plan (hooks, adapters added later) runs in: no format, but arguments of one dtype."""
    choices = {**mechanics(rulebook), **{op: Choice("widest") for op in GEMM_OPS}}
    return tuple((op, None, choice) for op, choice in sorted(choices.items()))


def apply(
    model: nn.Module, plan: Plan, rulebook: Rulebook, fusions: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> Conversion:
    """Puts every module of ``model`` into the frames of ``plan``.

    Args:
        model: not converted.
        plan: the plan.
        rulebook: the rules.
        fusions: FQN of a norm → of the layers that run it in one.
    """
    builder = FrameBuilder(plan, rulebook, fusions)
    conversion = Conversion(plan, Receipt(rows=()), caches=note_caches(model))
    restore_outputs = plan.level != "O3"
    states: dict[tuple[Any, ...], FrameState] = {}
    for fqn, module in model.named_modules():
        frames = {name: builder.frame(fqn, module, name) for name in framed_methods(original_class(module))}
        key = tuple(sorted((name, id(frame)) for name, frame in frames.items()))
        if key not in states:
            states[key] = FrameState(frames, builder.neutral, restore_outputs)
        reason = set_frames(module, states[key])
        if reason is not None:
            conversion.refused[fqn] = reason
    conversion.backends, conversion.fusions = builder.backends, dict(fusions)
    _keep_unfused(model, conversion)
    guard_foreign_code(model)
    if plan.level in ("O2", "O3"):
        low = storage_format(plan)
        if low is not None:
            dtype = DTYPES[low]
            conversion.stored = store(model, dtype, masters=plan.level == "O2" and plan.mode == "training")
    vars(model)[CONVERSION] = conversion
    root = original_class(model)
    if not conversion.refused.get("") and not leaf_op(root) and not inspect.isgeneratorfunction(root.forward):
        vars(model)[FAST] = FastPath(keep_weights=plan.mode == "inference", merge_training=plan.merge_casts)
    return conversion


def storage_format(plan: Plan) -> str | None:
    """The plan's 16-bit format, that of its last 16-bit rule; None if it has none."""
    return next((r.formats.input for r in reversed(plan.rules) if r.formats.input in ("bf16", "fp16")), None)


def _keep_unfused(model: nn.Module, conversion: Conversion) -> None:
    """Switches off the fused encoder layer: under Dynamo it takes the layer past the plan, in fp32, in silence."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            conversion.patched.append((fqn, "activation_relu_or_gelu", module.activation_relu_or_gelu))
            module.activation_relu_or_gelu = 0


def undo(model: nn.Module) -> None:
    """Takes a plan out of a model; does nothing if there is none."""
    conversion = vars(model).pop(CONVERSION, None)
    vars(model).pop(FAST, None)
    forget(model.parameters())
    forget_weights(model.parameters())
    for module in model.modules():
        remove(module)
    if conversion is None:
        return
    for fqn, name, value in conversion.patched:
        setattr(model.get_submodule(fqn), name, value)
    if conversion.stored is not None:
        restore(model, conversion.stored)
    restore_caches(model, conversion.caches)
