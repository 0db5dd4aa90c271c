"""``analyze``: which precision each site of a model needs, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.analyze.facts import Graph, SiteFacts
from autoprec.analyze.findings import Findings
from autoprec.analyze.gradients import score_gradients
from autoprec.analyze.lineage import Lineages, is_explicit_upcast
from autoprec.analyze.patterns import find_patterns
from autoprec.analyze.provenance import find_choices, find_decompositions, find_islands, island_reason
from autoprec.analyze.ranges import RangeJudge
from autoprec.analyze.report import Analysis, SiteReport, Tag, Verdict
from autoprec.analyze.shadow import ShadowRun
from autoprec.errors import UsageError
from autoprec.formats import get_format
from autoprec.frames.swap import leaf_op, original_class
from autoprec.graph.dataflow import CASTS, Step, follow
from autoprec.graph.inputs import Run, as_run
from autoprec.graph.record import Recording, is_leaf
from autoprec.graph.site import Site
from autoprec.plan import Mode
from autoprec.rulebook import Rulebook, load_rulebook
from autoprec.target import Target, load_target

FORMATS_16 = {"bf16": torch.bfloat16, "fp16": torch.float16}

_TAGS: dict[str, Tag] = {"fp32": "fp32", "low": "low", "follow": "follow", "fixed": "follow"}


def analyze(
    model: nn.Module,
    example_inputs: Any = None,
    target: str | Target = "auto",
    *,
    rulebook: Rulebook | None = None,
    formats: Sequence[str] = ("bf16", "fp16"),
    mode: Mode = "training",
    gradients: bool | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Analysis:
    """Finds what each site needs: by its op, its pattern, its provenance, and the numbers that go through it.

    The model runs twice on the example inputs, as it is; buffers, gradients, random state and train/eval are afterwards
    as they were.  Costs a few times those two runs, and memory for the live activations once more per format and value.

    Args:
        model: an fp32 model, not converted.
        example_inputs: a tensor, a tuple (positional arguments), a dict (keyword arguments) or a callable
            ``run(model)`` that may make many calls.  None: no values are seen; the rows are the layers
            that are one matrix product, each by its op rule.
        target: names the 16-bit format that :meth:`Analysis.tags` answers for by default.
        rulebook: op rules; the shipped ones by default.
        formats: ``"bf16"``, ``"fp16"`` or both.
        mode: ``training`` asks for more head-room below a format's largest value than ``inference``.
        gradients: also compare weight gradients with those of a run in the format; None: only if ``loss`` is given.
        loss: a scalar from what the run returns; by default the mean square of its floating outputs.

    Raises:
        UsageError: an argument can't be used.
        TargetError, RuleError: see :func:`autoprec.load_target` and :func:`autoprec.rulebook.load_rulebook`.
    """
    names = tuple(formats)
    _check(model, names)
    device = target if isinstance(target, Target) else load_target(target)
    rules = rulebook or load_rulebook()
    watch = _Watch(model, rules, names, mode)
    recording = Recording()
    if example_inputs is not None:
        recording = follow(model, as_run(example_inputs), watch.see)
    else:
        recording.sites.update((site.id, site) for site in _layers(model))
    watch.finish(recording)
    if loss is not None if gradients is None else gradients:
        if example_inputs is None:
            raise UsageError("gradients need example_inputs: give the batches to take them on")
        watch.score_gradients(model, as_run(example_inputs), loss)
    low = device.low_format if device.low_format in names else names[0]
    return Analysis(
        rows=watch.rows(),
        formats=names,
        target=device.name,
        low_format=low,
        is_measured=example_inputs is not None,
        refused=dict(recording.refused),
    )


class _Watch:
    """Collects everything from the calls of one run."""

    def __init__(self, model: nn.Module, rulebook: Rulebook, names: tuple[str, ...], mode: Mode) -> None:
        self._rulebook, self._names = rulebook, names
        self._graph, self._findings = Graph(model), Findings()
        self._lineages = Lineages(model)
        kinds = {op: rule.kind for op, rule in rulebook.ops.items()}
        self._runs = [
            ShadowRun(
                name, FORMATS_16[name], rulebook, RangeJudge(get_format(name), mode, self._graph, self._findings, kinds)
            )
            for name in names
        ]

    def see(self, step: Step) -> None:
        with torch.no_grad():
            facts = self._graph.note(step, self._lineages)
            self._lineages.follow(step)
            if facts is not None:
                self._graph.note_result(facts, step, self._lineages)
            is_upcast = step.op in CASTS and is_explicit_upcast(step)
            for run in self._runs:
                run.follow(step, facts, is_kept=self._is_kept(facts, run.name), is_upcast=is_upcast)

    def _is_kept(self, facts: SiteFacts | None, name: str) -> bool:
        if facts is None:
            return False
        return (facts.site.id, name) in self._findings or island_reason(facts) is not None

    def finish(self, recording: Recording) -> None:
        self._graph.finish(recording.sites)
        find_islands(self._graph, self._findings, self._names)
        find_choices(self._graph, self._findings, self._names)
        find_decompositions(self._graph, self._findings, self._names)
        find_patterns(self._graph, self._findings, self._names)

    def score_gradients(self, model: nn.Module, run: Run, loss: Callable[[Any], torch.Tensor] | None) -> None:
        formats = {name: FORMATS_16[name] for name in self._names}
        score_gradients(model, run, loss, self._graph, self._findings, formats)

    def rows(self) -> tuple[SiteReport, ...]:
        return tuple(self._row(facts) for facts in self._graph)

    def _row(self, facts: SiteFacts) -> SiteReport:
        return SiteReport(
            site=facts.site,
            verdicts={name: self._verdict(facts, name) for name in self._names},
            max_abs=facts.max_abs if facts.is_seen else None,
            errors=dict(facts.errors),
            gradient_errors=dict(facts.gradient_errors),
            producers=(*facts.producers, *(p for p in facts.pickers if p not in facts.producers)),
            consumers=tuple(facts.consumers),
        )

    def _verdict(self, facts: SiteFacts, name: str) -> Verdict:
        rule = self._rulebook.rule_for(facts.op)
        found = self._findings.get(facts.site.id, name)
        if found is None:
            return Verdict(tag=_TAGS[rule.kind], source="op", reason=rule.why)
        if rule.kind == "fp32":
            return Verdict(tag="fp32", source="op", reason=f"{found.reason}; {rule.why}")
        if rule.kind != "low" and name not in facts.lows:
            # What it reads comes in fp32 already: naming it in a plan would only cost.
            return Verdict(tag="follow", source="op", reason=f"{found.reason}; what it reads is fp32")
        return found


def _layers(model: nn.Module) -> Iterator[Site]:
    """The sites that are known without running the model."""
    for fqn, module in model.named_modules():
        cls = original_class(module)
        op = leaf_op(cls) or (module.mode.lower() if isinstance(module, nn.RNNBase) else None)
        if op is not None and is_leaf(module):
            yield Site(module=fqn, op=op, leaf=True, num_params=sum(p.numel() for p in module.parameters()))


def _check(model: Any, names: tuple[str, ...]) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    wrong = [name for name in names if name not in FORMATS_16]
    if wrong or not names:
        raise UsageError(f"formats={names!r}: give 'bf16', 'fp16' or both")
