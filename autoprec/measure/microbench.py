"""What each op of a model costs in each format, by running it alone on the device in this machine.

Each distinct call (op, shapes, strides, settings) is made again in a small module that is converted as the model would
be: casts of weights, the choice of a backend, padding and quantisation are inside.  Its formats take turns in one
process, with a yardstick that makes the costs of all ops one unit.

Activations come in the format that the op reads, since whether they must be cast first is the neighbours' affair:
:meth:`Costs.cast_s` prices that.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from autoprec.errors import UsageError
from autoprec.formats import FORMATS
from autoprec.lower.gemm import DTYPES
from autoprec.measure.costcache import CostCache, Reading
from autoprec.measure.measurement import Measurement
from autoprec.measure.replay import OpCall
from autoprec.measure.solo import forward_backward, is_wide, no_grad, solo_step
from autoprec.measure.timing import Step
from autoprec.measure.yardstick import Ruler, seconds_of
from autoprec.plan import Formats, Mode

FormatsOf = Callable[[str], Formats]
#: ``on_progress(done, total, what)`` after each distinct call.
OnProgress = Callable[[int, int, str], None]

#: A short call is timed in copies, up to so many and until they take so long.
_MAX_COPIES, _COPIES_S = 8, 3e-4
#: Elements of the two tensors whose casts are timed: one in a core's cache, one beyond.
_CPU_CASTS, _GPU_CASTS = (2**12, 2**20), (2**16, 2**24)
_COPIED_ELEMENTS = 2**19


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCost:
    """A cast of an activation, in training with the one of its gradient: ``launch_s + per_element_s · numel``."""

    launch_s: float
    per_element_s: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs of the sites of one model.

    Args:
        seconds: site id → choice → seconds of a step that the site's calls take, weight casts included.
        missing: site id → why one of its choices, or all of them, wasn't measured.
        casts: ``(source, format)`` → cost of a cast between two storage formats.
        mode: ``inference`` is the forward alone.
        device: what was measured on.
    """

    seconds: Mapping[str, Mapping[str, Measurement]]
    missing: Mapping[str, str]
    casts: Mapping[tuple[str, str], CastCost]
    mode: Mode
    device: str

    def cast_s(self, numel: int, source: str, format: str) -> float:
        """Seconds of a step that casting an activation takes, in training there and its gradient back.

        Args:
            numel: elements.
            source, format: 16- or 32-bit formats, those that the measured choices store activations in.

        Raises:
            UsageError: that cast wasn't measured.
        """
        if source == format or numel == 0:
            return 0.0
        cost = self.casts.get((source, format))
        if cost is None:
            known = ", ".join(f"{a} to {b}" for a, b in self.casts) or "none"
            raise UsageError(f"the cast of {source!r} to {format!r} wasn't measured; measured: {known}")
        return cost.launch_s + cost.per_element_s * numel


def measure_costs(
    calls: Sequence[OpCall],
    choices: Mapping[str, Sequence[str]],
    *,
    device: torch.device | str = "cpu",
    mode: Mode = "training",
    low: str = "bf16",
    formats_of: FormatsOf = Formats.all,
    recipe: Mapping[str, object] | None = None,
    budget_s: float = 20.0,
    cache: CostCache | None = None,
    on_progress: OnProgress | None = None,
) -> Costs:
    """Measure what the sites cost in each format that they may take.

    Calls with most FLOPs come first; what the budget doesn't reach is missing, and says so.

    Args:
        calls: of the model, from :func:`autoprec.measure.replay.record_calls`.
        choices: site id → choices; ``fp32`` is always among them.  A site that isn't there isn't measured.
        device: of this machine.
        mode: ``training`` measures forward and backward.
        low: 16-bit format of activations around ops in fewer bits.
        formats_of: choice → formats by role, as the plans to be priced have them.
        recipe: of formats in fewer bits, as a plan holds it.
        budget_s: seconds that new measurements may take.
        cache: readings of earlier runs, and where new ones go; None measures all again.
        on_progress: called after each distinct call.

    Raises:
        UsageError: a choice gives no number format.
    """
    asked = {site: tuple(dict.fromkeys(("fp32", *names))) for site, names in choices.items()}
    calls = [call for call in calls if call.site.id in asked]
    bench = _Bench(Ruler(device, cache), mode, low, formats_of, dict(recipe or {}))
    alike: dict[tuple[str, tuple[str, ...]], list[OpCall]] = defaultdict(list)
    for call in calls:
        alike[call.key, asked[call.site.id]].append(call)
    largest_first = sorted(alike.items(), key=lambda item: _work(item[1]), reverse=True)
    try:
        # the caller's random numbers are its own, and it may be evaluating
        with torch.random.fork_rng(_gpus(bench.ruler.device)), torch.enable_grad():
            casts = bench.casts({bench.storage(name) for names in asked.values() for name in names})
            deadline = time.monotonic() + budget_s
            for done, ((_, names), group) in enumerate(largest_first, start=1):
                late = f"the budget of {budget_s:g} s was spent on larger ones" if time.monotonic() >= deadline else ""
                bench.measure(group[0], names, late)
                if on_progress is not None:
                    on_progress(done, len(largest_first), _label(group[0]))
    finally:
        if cache is not None:
            cache.save()
    return bench.costs(calls, asked, casts)


def measure_seconds(
    steps: Mapping[str, Step], *, device: torch.device | str = "cpu", cache: CostCache | None = None
) -> dict[str, Measurement]:
    """Seconds of whole steps in the unit of :func:`measure_costs`, so that they can be compared and subtracted.

    Args:
        steps: name → a call that does one step, such as the optimizer's.
        device: what they run on.
        cache: that of the costs; without one, the unit is that of the process's latest.
    """
    ruler = Ruler(device, cache)
    found = ruler.read(steps)
    if cache is not None:
        cache.save()
    return {name: ruler.seconds([reading]) for name, reading in found.items()}


class _Bench:
    """The readings of one model's calls."""

    def __init__(self, ruler: Ruler, mode: Mode, low: str, formats_of: FormatsOf, recipe: dict[str, object]) -> None:
        self.ruler, self.low, self.formats_of, self.recipe = ruler, low, formats_of, recipe
        self.mode: Mode = mode
        self.failures: dict[str, str] = {}

    def storage(self, choice: str) -> str:
        """Format of the activations around a choice.

        Raises:
            UsageError: the choice leaves the format to something else.
        """
        name = self.formats_of(choice).input
        if name not in FORMATS:
            raise UsageError(f"choice {choice!r} gives {name!r}, which is no number format: its cost isn't its own")
        return name if name in DTYPES else self.low

    def key(self, call: OpCall, choice: str) -> str:
        """Of a reading: all that its cost depends on beside the cache's identity."""
        formats = self.formats_of(choice)
        narrow = "" if is_wide(formats) else f" in {self.low} {json.dumps(self.recipe, sort_keys=True)}"
        return f"{call.key} {self.mode} {formats}{narrow}"

    def measure(self, call: OpCall, choices: Iterable[str], refusal: str) -> None:
        """Takes the readings of a call that aren't known yet; with a refusal, that is why there are none."""
        unknown = [name for name in choices if self.ruler.known(self.key(call, name)) is None]
        refusal = call.why_not or refusal
        if refusal or not unknown:
            self.failures.update({self.key(call, name): refusal for name in unknown})
            return
        copies, steps = 1, {}
        for name in unknown:
            try:
                if not steps:
                    alone = seconds_of(self._step(call, name, 1), self.ruler.device)
                    copies = min(_MAX_COPIES, math.ceil(_COPIES_S / alone))
                steps[name] = self._step(call, name, copies)
                steps[name]()
            except Exception as error:  # any op of any model comes here, and each has errors of its own
                steps.pop(name, None)
                self.failures[self.key(call, name)] = f"{name} can't run alone: {_first_line(error)}"
        for name, reading in self.ruler.read(steps, _label(call), copies).items():
            self.ruler.keep(self.key(call, name), reading)

    def _step(self, call: OpCall, choice: str, copies: int) -> Step:
        return solo_step(
            call,
            self.formats_of(choice),
            low=self.low,
            mode=self.mode,
            recipe=self.recipe,
            device=self.ruler.device,
            copies=copies,
        )

    def casts(self, formats: Iterable[str]) -> dict[tuple[str, str], CastCost]:
        """The cost of each cast between formats, from two sizes."""
        small, large = _CPU_CASTS if self.ruler.device.type == "cpu" else _GPU_CASTS
        costs = {}
        for pair in permutations(sorted(formats), 2):
            if DTYPES[pair[0]] == DTYPES[pair[1]]:
                costs[pair] = CastCost(launch_s=0.0, per_element_s=0.0)
                continue
            low_s, high_s = (self.ruler.seconds([self._cast(*pair, numel)]).value for numel in (small, large))
            per_element_s = max(0.0, (high_s - low_s) / (large - small))
            costs[pair] = CastCost(launch_s=max(0.0, low_s - per_element_s * small), per_element_s=per_element_s)
        return costs

    def _cast(self, source: str, format: str, numel: int) -> Reading:
        key = f"cast {source} {format} {numel} {self.mode}"
        known = self.ruler.known(key)
        if known is not None:
            return known
        training, copies = self.mode == "training", min(_MAX_COPIES, 1 + _COPIED_ELEMENTS // numel)
        given = [torch.randn(numel, device=self.ruler.device).to(DTYPES[source]) for _ in range(copies)]
        tensors = [tensor.requires_grad_(training) for tensor in given]

        def cast() -> list[torch.Tensor]:
            return [tensor.to(DTYPES[format]) for tensor in tensors]

        step = forward_backward(cast, tensors) if training else no_grad(cast)
        reading = self.ruler.read({format: step}, f"cast of {numel} {source} to", copies)[format]
        return self.ruler.keep(key, reading)

    def costs(
        self,
        calls: Iterable[OpCall],
        asked: Mapping[str, Sequence[str]],
        casts: Mapping[tuple[str, str], CastCost],
    ) -> Costs:
        """The readings, by site."""
        calls_of: dict[str, list[OpCall]] = defaultdict(list)
        for call in calls:
            calls_of[call.site.id].append(call)
        missing = {site: "the model made no call of it" for site in asked if site not in calls_of}
        seconds: dict[str, dict[str, Measurement]] = defaultdict(dict)
        for site, made in calls_of.items():
            for choice in asked[site]:
                keys = [self.key(call, choice) for call in made]
                readings = [reading for key in keys if (reading := self.ruler.known(key)) is not None]
                if len(readings) == len(keys):
                    seconds[site][choice] = self.ruler.seconds(readings, [call.count for call in made])
                else:
                    missing.setdefault(site, next(self.failures[key] for key in keys if key in self.failures))
        device = self.ruler.environment.device
        return Costs(seconds=dict(seconds), missing=missing, casts=casts, mode=self.mode, device=device)


def _gpus(device: torch.device) -> list[int]:
    """Devices whose generator is used beside the CPU's."""
    return [device.index or 0] if device.type == "cuda" else []


def _work(calls: Sequence[OpCall]) -> tuple[int, int]:
    """FLOPs of some calls in a step, then the elements that they read."""
    return sum(c.count * c.site.flops for c in calls), sum(c.count * c.numel for c in calls)


def _label(call: OpCall) -> str:
    return f"{call.site.op} {' '.join('x'.join(map(str, shape)) for shape in call.site.input_shapes)}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
