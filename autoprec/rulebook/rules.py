"""What a rule file says, as frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autoprec.plan import PlanRule, ScalerSettings

OpKind = Literal["low", "fp32", "fixed", "follow"]
FixedDtype = Literal["", "widest", "destination"]
Guard = Literal["", "factory", "fill"]
Precision = Literal["high", "fp32"]
Position = Literal["", "first", "last", "first_block", "last_block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """Which precision an op needs.

    Args:
        op: canonical name.
        kind: ``low``: arguments go to the low format; ``fp32``: 16-bit arguments go to fp32; ``fixed``: all floating
            arguments go to one dtype; ``follow``: they stay as they come.
        dtype: of ``fixed``: ``widest`` among the arguments, or ``destination``, that of the first floating tensor.
        guard: of an op that follows. ``factory``: a 16-bit ``dtype=`` argument is replaced by fp32; ``fill``: a tensor
            whose dtype can't hold the fill value goes to fp32 first.
        why: the reason, for a reader.
        source: public evidence.
        file: name of the rule file; empty for the rule of an op that no file names.
    """

    op: str
    kind: OpKind
    dtype: FixedDtype = ""
    guard: Guard = ""
    why: str
    source: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """Sites of a family that stay high: those that satisfy all that is given.

    Args:
        classes: globs over the class name of the site's module or of one around it.
        names: globs over the module's FQN.
        ops: canonical op names.
        position: ``first`` or ``last`` in order of execution among the matrix products that satisfy the rest;
            ``first_block`` or ``last_block``: inside the first or last entry of an outermost numbered container.
        precision: ``high`` is 16 bit instead of fp8 or lower; ``fp32`` is fp32.
        why: the reason, for a reader.
        source: public evidence.
    """

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    position: Position = ""
    precision: Precision
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of model, how it is recognised, and what stays high in it.

    Args:
        name: ``cnn``, ``transformer``, …
        classes: globs over class names of modules.
        ops: canonical names of ops.
        min_sites: so many modules of ``classes``, or sites of ``ops``, make a model one of the family.
        keep: sites that stay high.
        why: what the family is.
        source: public evidence.
        file: name of the rule file.
    """

    name: str
    classes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    min_sites: int = 1
    keep: tuple[FamilyRule, ...]
    why: str
    source: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerPrior:
    """Where a loss scaler starts, for models of fewer than ``below_params`` parameters (``inf`` for the last)."""

    below_params: float
    settings: ScalerSettings
    why: str
    source: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRule:
    """A user's rule for sites, ready to be put first in a plan."""

    rule: PlanRule
    file: str


@dataclass(frozen=True, kw_only=True)
class Rulebook:
    """All rules in force.

    Args:
        ops: rule per canonical op name.
        families: family per name.
        scaler: priors, by rising ``below_params``.
        sites: the user's site rules, those that win first.
        files: names of the files read, the shipped ones first.
    """

    ops: Mapping[str, OpRule]
    families: Mapping[str, Family]
    scaler: tuple[ScalerPrior, ...]
    sites: tuple[SiteRule, ...] = ()
    files: tuple[str, ...] = ()

    def rule_for(self, op: str) -> OpRule:
        """The rule of an op; one that no file names follows its inputs."""
        return self.ops.get(op) or OpRule(op=op, kind="follow", why="no rule names it", source="")

    def scaler_for(self, num_params: int) -> ScalerPrior:
        """The loss-scaler prior for a model of that size."""
        return next(prior for prior in self.scaler if num_params < prior.below_params)

    @property
    def plan_rules(self) -> tuple[PlanRule, ...]:
        """The user's site rules as they go into a plan, in order."""
        return tuple(site.rule for site in self.sites)
