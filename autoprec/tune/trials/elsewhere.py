"""A plan for a target that isn't here: what trains in its place, and what it should take there.

Its loss is real: each operand is rounded as the target would, and multiplied in fp32.  Its speed and its memory are
estimates, from the sites that one step of the task showed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from autoprec.analyze import SiteReport, analyze
from autoprec.errors import TargetError
from autoprec.estimate import Estimate, estimate_memory, estimate_step
from autoprec.graph.inputs import Run
from autoprec.graph.site import Site
from autoprec.lower.gemm import needs_backend
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.planner.fold import literal
from autoprec.target import Target
from autoprec.tasks import Task
from autoprec.tune.posing.sitecosts import formats_of
from autoprec.tune.trials.speed import EstimatedComparison

_BACKEND = ("emulated",)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The sites of a task's step, and the device that they are priced for.

    Args:
        rows: sites with shapes, and which reads which.
        target: the device.
        task: says whether it trains.
        num_params: of the model, each counted once.
        optimizer_bytes: state a parameter.
    """

    rows: tuple[SiteReport, ...]
    target: Target
    task: Task
    num_params: int
    optimizer_bytes: float

    def speed(self, plan: Plan) -> EstimatedComparison:
        """The plan's step against fp32's on the target.

        Raises:
            TargetError: a number of the target that is needed isn't known.
        """
        return EstimatedComparison(candidate=self._step(self.as_there(plan)), baseline=self._baseline)

    def memory(self, plan: Plan) -> Estimate:
        """Peak bytes of the plan's step."""
        plan = self.as_there(plan)
        return estimate_memory(
            self.rows,
            formats_of(plan),
            num_params=self.num_params,
            low=_low(plan),
            mode=self.task.mode,
            optimizer_bytes=self.optimizer_bytes,
        )

    def as_there(self, plan: Plan) -> Plan:
        """The plan with the formats that the target's kernels would really run, rounded by emulation.

        A layer that its kernels can't take stays at 16 bit there, so it does here.
        """
        if plan.level == "O0":
            return plan
        asked, low, mode = formats_of(plan), _low(plan), self.task.mode
        left = tuple(_glob(row.site) for row in self.rows if self._is_left(row.site, asked(row.site)))
        rules = tuple(replace(r, backend=_BACKEND) if needs_backend(r.formats, mode) else r for r in plan.rules)
        if left:
            reason = f"the kernels of {self.target.name} can't take it below 16 bit"
            rules = (PlanRule(match=left, formats=Formats.all(low), reason=reason, source="cost"), *rules)
        return replace(plan, rules=rules)

    def _is_left(self, site: Site, formats: Formats | None) -> bool:
        """Whether a product below 16 bit has no kernel there: not a Linear's own, or not of a multiple of its tiles."""
        if site.op != "linear" or formats is None or not needs_backend(formats, self.task.mode):
            return False
        multiple = max(map(self.target.align, (formats.input, formats.weight, formats.grad_output)))
        return not site.leaf or any(size % multiple for size in site.input_shapes[1])

    @cached_property
    def _baseline(self) -> Estimate:
        return self._step(Plan(rules=(), level="O0"))

    def _step(self, plan: Plan) -> Estimate:
        return estimate_step(self.rows, formats_of(plan), self.target, low=_low(plan), mode=self.task.mode)


def record_estimator(task: Task, model: nn.Module, run: Run, target: Target, *, optimizer_bytes: float) -> Estimator:
    """Record one step of a task.

    Args:
        task: of the model.
        model: in fp32, not converted; left as it is.
        run: one step's forward.
        target: that speeds and memory are estimated for.
        optimizer_bytes: state a parameter.
    """
    low = target.low_format if target.low_format != "fp32" else "bf16"
    analysis = analyze(model, run, target=target, mode=task.mode, formats=(low,))
    return Estimator(
        rows=analysis.rows,
        target=target,
        task=task,
        num_params=sum(param.numel() for param in model.parameters()),
        optimizer_bytes=optimizer_bytes,
    )


def refuse_unknown(target: Target) -> None:
    """Check that a target's speed can be estimated at all.

    Raises:
        TargetError: its fp32 peak or its bandwidth isn't known.
    """
    missing = [] if "fp32" in target.peaks_flops else ["peak in fp32"]
    missing += [] if target.bandwidth_bytes_per_s else ["bandwidth"]
    missing += [f"peak in {name}" for name in target.formats if name not in target.peaks_flops and name != "fp32"]
    if missing:
        raise TargetError(
            f"{target.name} isn't here, and its speed can't be estimated: its {', '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'}n't known. Run it on a machine that has one, or give the numbers in "
            "a target file of your own (--target FILE.toml)"
        )


def _low(plan: Plan) -> str:
    """The plan's 16-bit format, as a converted model finds it."""
    names = (rule.formats.input for rule in reversed(plan.rules))
    return next((name for name in names if name in ("bf16", "fp16")), "fp32")


def _glob(site: Site) -> str:
    return f"{literal(site.scope)}::{site.op}#{site.index}"
