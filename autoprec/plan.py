"""The Plan: which format each site runs in, and why.  The one currency between all parts of autoprec."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from autoprec.errors import UsageError
from autoprec.formats import FORMATS

if TYPE_CHECKING:
    from autoprec.plandiff import PlanDiff
    from autoprec.scaler import BoundedGradScaler

SCHEMA_VERSION = 1

#: Formats a rule may name beside the real ones: leave the arguments as they come; cast them all to one dtype
#: (the widest, or the destination's for an op that writes).
FOLLOW, FIXED = "follow", "fixed"

#: Every name that a rule may give as a format.
RULE_FORMATS = (*FORMATS, FOLLOW, FIXED)

Mode = Literal["training", "inference"]
Level = Literal["O0", "O1", "O2", "O3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Format of each GEMM operand; for any other op only ``input`` counts."""

    input: str
    weight: str
    grad_output: str

    def __post_init__(self) -> None:
        for role in fields(self):
            name = getattr(self, role.name)
            if name not in RULE_FORMATS:
                raise UsageError(f"{name!r} is no format for {role.name}: use one of {', '.join(RULE_FORMATS)}")

    @classmethod
    def all(cls, name: str) -> Formats:
        return cls(input=name, weight=name, grad_output=name)

    def __str__(self) -> str:
        parts = (self.input, self.weight, self.grad_output)
        return self.input if len(set(parts)) == 1 else "/".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """The sites that match any of the globs get these formats.

    Args:
        match: globs over a site's aliases: ``blocks.*.attn.q``, ``*::softmax``, ``blocks.3.attn::matmul#0``.
        formats: format per role.
        backend: backends to try in order; empty means the fastest that can.
        reason: why, for a reader.
        source: who decided: ``op pattern provenance range gradient family cost user search``.
    """

    match: tuple[str, ...]
    formats: Formats
    backend: tuple[str, ...] = ()
    reason: str = ""
    source: str = "op"

    def __post_init__(self) -> None:
        # a bare string would match letter by letter
        globs = self.match if isinstance(self.match, tuple) else ()
        if not globs or not all(glob and isinstance(glob, str) for glob in globs):
            raise UsageError(f"match={self.match!r} must be a tuple of globs, such as ('*.attn.q', '*::matmul')")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """Arguments of :class:`torch.amp.GradScaler` and the bounds of its scale.

    ``scale`` multiplies the loss.  ``enabled`` only where a gradient format needs it (fp16).

    Args:
        enabled: without it the loss isn't scaled, whatever the other fields say.
        init_scale: scale of the first step.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps in a row without overflow.
        backoff_factor: the scale is multiplied by it when a gradient isn't finite, and that step is skipped.
        growth_interval: in optimizer steps.
        min_scale: floor of the scale.
        max_scale: ceiling of the scale.
    """

    enabled: bool = False
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        limits = {
            "init_scale": (self.min_scale <= self.init_scale <= self.max_scale, "between min_scale and max_scale"),
            "growth_factor": (1 < self.growth_factor < math.inf, "above 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1, both excluded"),
            "growth_interval": (1 <= self.growth_interval < 2**31, "a whole number from 1 to 2^31 - 1"),
            "min_scale": (0 < self.min_scale < math.inf, "above 0"),
            # torch holds the scale in fp32
            "max_scale": (self.min_scale <= self.max_scale <= 2.0**127, "between min_scale and 2^127"),
        }
        for name, (is_fine, allowed) in limits.items():
            if not is_fine:
                raise UsageError(f"scaler {name}={getattr(self, name)!r} must be {allowed}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Ordered rules (the first match wins) and all that is needed to apply them elsewhere.

    Args:
        rules: see :class:`PlanRule`.  A site that nothing matches follows its inputs.
        target: name of the target the plan is for.
        mode: ``training`` or ``inference``.
        level: ``O0`` fp32; ``O1`` casts at run time; ``O2``/``O3`` store parameters in 16 bit.
        recipe: settings of the fp8 and block formats, by name.
        scaler: loss-scaler settings.
        fingerprint: of the model, see :mod:`autoprec.fingerprint`; empty fits any model.
        evidence: measured loss and speed with intervals, device, versions, date; empty when made by rules alone.
    """

    rules: tuple[PlanRule, ...]
    target: str = "cpu"
    mode: Mode = "training"
    level: Level = "O1"
    recipe: dict[str, Any] = field(default_factory=dict)
    scaler: ScalerSettings = ScalerSettings()
    merge_casts: bool = False
    fingerprint: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def with_rules_first(self, *rules: PlanRule) -> Plan:
        """A plan in which these rules win over the present ones."""
        return replace(self, rules=(*rules, *self.rules))

    @property
    def sha256(self) -> str:
        """Hex digest of everything in the plan, evidence included, whatever wrote the JSON."""
        from autoprec.planfile import digest

        return digest(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, with its ``schema_version`` and ``sha256``.

        Raises:
            PlanFileError: a value has no place in JSON, such as a tensor or a NaN in ``evidence``.
        """
        from autoprec.planfile import to_json

        return to_json(self)

    @staticmethod
    def from_json(document: dict[str, Any] | str) -> Plan:
        """The plan in a JSON document, parsed or as text.

        Raises:
            PlanFileError: the document isn't a valid plan.
        """
        from autoprec.planfile import from_json

        return from_json(document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, in one atomic replacement of the file.

        Raises:
            PlanFileError: the file can't be written, or a value has no place in JSON.
        """
        from autoprec.planfile import save_plan

        save_plan(self, path)

    def diff(self, other: Plan, *, evidence: bool = False) -> PlanDiff:
        """What changes from this plan to the other; see :func:`autoprec.plandiff.diff`."""
        from autoprec.plandiff import diff

        return diff(self, other, evidence=evidence)

    def grad_scaler(self, device: str | None = None) -> BoundedGradScaler:
        """A :class:`torch.amp.GradScaler` with the plan's settings, which keeps its scale between their bounds.

        Args:
            device: device type of the losses; None is this machine's accelerator, else the CPU.

        Raises:
            UsageError: the plan needs a scaler and this machine has no such device.
        """
        from autoprec.scaler import BoundedGradScaler

        return BoundedGradScaler(self.scaler, device=device)

    def __hash__(self) -> int:
        # the dicts can't be hashed; equal plans have equal rules
        return hash((self.rules, self.target, self.mode, self.level))

    def __repr__(self) -> str:
        formats = Counter(str(rule.formats) for rule in self.rules)
        counts = ", ".join(f"{count} {name}" for name, count in formats.most_common())
        return f"Plan({len(self.rules)} rules: {counts or 'none'}; {self.target}, {self.mode}, {self.level})"
