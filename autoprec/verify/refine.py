"""Takes formats back until a converted model is near enough to fp32 on its example inputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from autoprec.errors import UsageError
from autoprec.graph.inputs import Run
from autoprec.graph.site import Site
from autoprec.lower.apply import apply, storage_format, undo
from autoprec.lower.gemm import DTYPES
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.rulebook import Rulebook
from autoprec.verify.deviation import RANDOM_OPS, Deviation, Seen, compare, observe, observe_rounded

_log = logging.getLogger("autoprec")

#: Relative L2 error, by 16-bit format, that needs no second look.
USUAL = {"bf16": 5e-2, "fp16": 2e-2}
#: Beyond that, allowed as a multiple of the error that rounding the parameters alone makes.
ROUNDING_MULTIPLE = 1.5
#: Gradients are compared up to this size: they take the parameters' memory twice more.
MAX_PARAMETERS = 300_000_000


@dataclass
class Reference:
    """The fp32 run of a model that is about to be converted."""

    run: Run
    seen: Seen
    rounded: Callable[[], Seen]

    @property
    def has_gradients(self) -> bool:
        return bool(self.seen.gradients)


def reference_run(model: nn.Module, run: Run, low: str, training: bool) -> Reference | None:
    """Runs the fp32 model once for later comparison; None if its outputs can't be compared.

    Args:
        model: not converted.
        run: calls it on the example inputs and returns its outputs.
        low: the 16-bit format it is to run in.
        training: compare gradients too.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(p.is_meta for p in model.parameters()):
        return None
    gradients = training and bool(parameters) and sum(p.numel() for p in parameters) <= MAX_PARAMETERS
    for wanted in dict.fromkeys((gradients, False)):
        try:
            seen = observe(model, run, wanted)
        except (UsageError, RuntimeError, AssertionError) as error:
            _log.info("no comparison with fp32 (gradients: %s): %s", wanted, error)
            continue
        return Reference(run, seen, lambda g=wanted: observe_rounded(model, run, DTYPES[low], g))
    return None


def measure_deviation(model: nn.Module, plan: Plan, rulebook: Rulebook, run: Run) -> Deviation | None:
    """How far a model in a plan is from fp32; None where that can't be measured.  Leaves the model as it is."""
    trial = _Trial.start(model, plan, rulebook, run)
    return None if trial is None else trial.measure(plan)


def refine(
    model: nn.Module, plan: Plan, rulebook: Rulebook, sites: Sequence[Site], run: Run
) -> tuple[Plan, Deviation | None]:
    """The plan, or one with more in fp32 that is near enough.  Leaves the model as it is.

    Args:
        model: not converted.
        plan: the rules' plan.
        rulebook: tells which ops are elementwise; the user's pins in it stay first.
        sites: recorded, in order of execution.
        run: calls the model on its example inputs and returns its outputs.

    Returns:
        the better plan and its measured deviation; None for that where it can't be measured.
    """
    low = storage_format(plan)
    trial = None if low is None or is_random(model, sites) else _Trial.start(model, plan, rulebook, run)
    if low is None or trial is None:
        return plan, None
    best, deviation = plan, trial.measure(plan)
    if deviation.within(Deviation(outputs=USUAL[low], gradient=USUAL[low])):
        return best, deviation
    limit = _limit(trial.reference, low)
    if deviation.within(limit):
        return best, deviation
    matcher = RuleMatcher(plan)
    products = [s.id for s in sites if s.is_gemm and _format(matcher, s) == low]
    pins = len(rulebook.plan_rules)
    for step in _ladder(sites, products, rulebook, low, deviation):
        tried = replace(plan, rules=(*plan.rules[:pins], *step, *plan.rules[pins:]))
        measured = trial.measure(tried)
        if measured.worst < deviation.worst:
            best, deviation = tried, measured
        if measured.within(limit):
            return tried, measured
    _log.warning("%s, more than is usual for %s; see the receipt", deviation, low)
    return best, deviation


def is_random(model: nn.Module, sites: Sequence[Site]) -> bool:
    """Whether the recorded call draws random numbers."""
    training = any(module.training for module in model.modules())
    return any(site.op in RANDOM_OPS for site in sites) and training


@dataclass(frozen=True)
class _Trial:
    """A model whose fp32 run is known, to be measured in one plan after the other."""

    model: nn.Module
    rulebook: Rulebook
    reference: Reference

    @classmethod
    def start(cls, model: nn.Module, plan: Plan, rulebook: Rulebook, run: Run) -> _Trial | None:
        low = storage_format(plan)
        reference = reference_run(model, run, low, plan.mode == "training") if low is not None else None
        return None if reference is None else cls(model, rulebook, reference)

    def measure(self, plan: Plan) -> Deviation:
        apply(self.model, plan, self.rulebook)
        try:
            seen = observe(self.model, self.reference.run, self.reference.has_gradients)
        finally:
            undo(self.model)
        return compare(seen, self.reference.seen)


def _limit(reference: Reference, low: str) -> Deviation:
    """The usual error, or that of rounded parameters if the model is so ill-conditioned that it is larger."""
    floor = compare(reference.rounded(), reference.seen)
    gradient = floor.gradient if floor.gradient is not None and math.isfinite(floor.gradient) else 0.0
    outputs = floor.outputs if math.isfinite(floor.outputs) else 0.0
    usual = USUAL[low]
    return Deviation(outputs=max(usual, ROUNDING_MULTIPLE * outputs), gradient=max(usual, ROUNDING_MULTIPLE * gradient))


def _ladder(
    sites: Sequence[Site], products: Sequence[str], rulebook: Rulebook, low: str, deviation: Deviation
) -> Iterator[tuple[PlanRule, ...]]:
    """Ever more fp32: what lies between the products, then the products from the first on."""
    between = sorted({s.op for s in sites if not s.is_gemm and _is_arithmetic(s.op, rulebook)})
    rules: tuple[PlanRule, ...] = ()
    if between:
        rules = (_rule([f"*::{op}" for op in between], f"with elementwise ops in {low}, {deviation}"),)
        yield rules
    for share in (0.25, 0.5, 0.75, 0.9):
        first = products[: math.ceil(share * len(products))]
        if len(first) < len(products):
            yield (*rules, _rule(list(first), f"with all products in {low}, {deviation}"))


def _format(matcher: RuleMatcher, site: Site) -> str | None:
    rule = matcher.rule_for_site(site.scope, site.op, site.index)
    return None if rule is None else rule.formats.input


def _is_arithmetic(op: str, rulebook: Rulebook) -> bool:
    """An op that computes and follows its inputs; moving values around rounds nothing."""
    rule = rulebook.ops.get(op)
    return rule is not None and rule.kind == "follow" and op in _ARITHMETIC


_ARITHMETIC = frozenset(
    {
        "add", "sub", "mul", "div", "sqrt", "addcmul", "addcdiv", "batch_norm", "lerp", "relu6", "leaky_relu", "elu",
        "selu", "celu", "gelu", "silu", "mish", "glu", "sigmoid", "tanh", "hardtanh", "hardsigmoid", "hardswish",
        "hardshrink", "softshrink", "softsign", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "erf",
    }
)  # fmt: skip


def _rule(globs: list[str], reason: str) -> PlanRule:
    return PlanRule(match=tuple(globs), formats=Formats.all("fp32"), reason=f"measured: {reason}", source="range")
