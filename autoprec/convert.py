"""``convert``, ``receipt`` and ``revert``: a plan in a model's forwards, what it did, and out again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any, get_args

import torch
from torch import nn

from autoprec.errors import ConversionError, UsageError
from autoprec.fingerprint import check_fingerprint
from autoprec.frames.swap import FAST
from autoprec.graph.inputs import Run, as_run
from autoprec.graph.record import record
from autoprec.lower.apply import CONVERSION, Conversion, apply, undo
from autoprec.lower.fusing import find_fusions, fusing_layers
from autoprec.lower.receipt import Receipt
from autoprec.lower.receipts import make_receipt
from autoprec.plan import Level, Mode, Plan
from autoprec.planner.rules import low_format, plan_by_rules
from autoprec.rulebook import Rulebook, load_rulebook
from autoprec.target import Target, load_target
from autoprec.verify.deviation import Deviation
from autoprec.verify.refine import is_random, measure_deviation, refine

__all__ = ["Receipt", "convert", "plan_for", "plan_of", "receipt", "revert"]

_log = logging.getLogger("autoprec")


def convert(
    model: nn.Module,
    target: str | Target = "auto",
    example_inputs: Any = None,
    plan: Plan | str | PathLike[str] | None = None,
    *,
    level: Level = "O1",
    mode: Mode = "training",
    formats: str | None = None,
    rules: Iterable[str | PathLike[str]] = (),
    strict: bool = False,
    inplace: bool = True,
    merge_casts: bool = False,
) -> nn.Module:
    """Makes a model run in the formats of a plan; without one, of the plan that rules give for the target.

    The model keeps its class name, ``isinstance``, parameters, ``state_dict`` keys and hooks; its outputs keep the
    dtypes of the fp32 model (but at ``O3``).  However it is called, the plan is in force.

    Args:
        model: any module; converted in place unless ``inplace=False``.
        target: name of a target (``"h100"``), a :class:`Target`, or ``"auto"``: the device in this machine.
        example_inputs: a tensor, a tuple (positional arguments), a dict (keyword arguments) or a callable
            ``run(model)``.  With them the plan also follows what the model's real numbers need, and the receipt is
            measured.
        plan: a :class:`Plan` or the path of one; ``target``, ``level``, ``mode``, ``formats`` and ``rules`` then
            don't count.
        level: ``O0`` fp32; ``O1`` casts at run time; ``O2`` stores parameters in 16 bit with fp32 masters; ``O3``
            without.
        mode: ``training`` or ``inference``; inference casts each weight once and keeps the cast beside it.
        formats: cap, e.g. ``"bf16"`` for no fp8.
        rules: the user's rule files, which override the shipped ones.
        strict: a site that can't get what the plan asks is an error.
        inplace: convert ``model`` itself, else a deep copy.
        merge_casts: let a training graph merge casts, which changes gradients at rounding level.

    Returns:
        the converted model: ``model`` itself if ``inplace``.

    Raises:
        UsageError, TargetError, RuleError: an argument can't be used.
        PlanFileError, PlanMismatchError: the plan can't be read, or is for another model.
        ConversionError: ``strict`` and a site didn't get what was asked.
    """
    _check(model, level=level, mode=mode)
    run = None if example_inputs is None else as_run(example_inputs)
    if not inplace:
        model = copy.deepcopy(model)
    rulebook = load_rulebook(*rules)
    previous = vars(model).get(CONVERSION)
    if previous is not None:
        undo(model)
    deviation = None
    if plan is None:
        plan, deviation = _decide(model, target, run, level, mode, formats, rulebook, merge_casts)
    elif not isinstance(plan, Plan):
        from autoprec.planfile import load_plan

        plan = load_plan(plan)
    check_fingerprint(plan, model)
    try:
        if run is None:
            conversion = apply(model, plan, rulebook)
            conversion.receipt = make_receipt(model, conversion, None)
        else:
            _apply_recorded(model, plan, rulebook, run, deviation)
        _report_refusals(_conversion(model), strict)
    except BaseException:
        undo(model)
        raise
    return model


def plan_for(
    model: nn.Module,
    target: str | Target,
    run: Run | None,
    level: Level,
    mode: Mode,
    formats: str | None,
    rulebook: Rulebook,
    merge_casts: bool = False,
) -> Plan:
    """The plan that rules, analysis and a comparison with fp32 give a model; the model is left as it is.

    Args:
        model: not converted.
        run: calls it on example inputs; None for op rules alone.
        target, level, mode, formats, merge_casts: see :func:`convert`.
        rulebook: the rules.
    """
    return _decide(model, target, run, level, mode, formats, rulebook, merge_casts)[0]


def _decide(
    model: nn.Module,
    target: str | Target,
    run: Run | None,
    level: Level,
    mode: Mode,
    formats: str | None,
    rulebook: Rulebook,
    merge_casts: bool,
) -> tuple[Plan, Deviation | None]:
    """The plan, and how far the model is from fp32 in it where that was measured."""
    device = target if isinstance(target, Target) else load_target(target)
    analysis = None
    if run is not None and level != "O0":
        from autoprec.analyze import analyze

        low = low_format(device, level, formats)
        if low != "fp32":
            analysis = analyze(model, run, target=device, rulebook=rulebook, mode=mode, formats=(low,))
    plan = plan_by_rules(
        model, device, rulebook, analysis=analysis, level=level, mode=mode, formats=formats, merge_casts=merge_casts
    )
    if run is None or analysis is None:
        return plan, None
    return refine(model, plan, rulebook, analysis.sites, run)


def receipt(model: nn.Module, example_inputs: Any = None) -> Receipt:
    """What each site of a converted model asked for and got.

    Args:
        model: a converted model.
        example_inputs: as :func:`convert` takes them, for a model that was converted without any: it is called twice on
            them, without a trace, and the receipt says what each site really ran in.

    Raises:
        UsageError: the model isn't converted.
    """
    conversion = _conversion(model)
    if example_inputs is not None:
        conversion.receipt = make_receipt(model, conversion, record(model, as_run(example_inputs)))
    fast = vars(model).get(FAST)
    written = conversion.receipt
    return written if fast is None else replace(written, notes=(*written.notes, fast.note))


def plan_of(model: nn.Module) -> Plan:
    """The plan a converted model runs in, to save and carry.

    Raises:
        UsageError: the model isn't converted.
    """
    return _conversion(model).plan


def revert(model: nn.Module) -> nn.Module:
    """Takes the plan out of a model: forwards and storage dtypes are as before, and values that weren't trained since.

    Does nothing to a model that isn't converted.  Returns the model.
    """
    undo(model)
    return model


def _apply_recorded(model: nn.Module, plan: Plan, rulebook: Rulebook, run: Run, deviation: Deviation | None) -> None:
    """Converts, and writes the receipt from a real call."""
    apply(model, plan, rulebook)
    recording = record(model, run)
    if deviation is None and not is_random(model, tuple(recording.sites.values())):
        undo(model)
        deviation = measure_deviation(model, plan, rulebook, run)
        apply(model, plan, rulebook)
    if layers := fusing_layers(_conversion(model)):
        undo(model)
        fusions, unfused = find_fusions(model, plan, layers, run)
        apply(model, plan, rulebook, fusions).unfused = unfused
        recording = record(model, run)
    conversion = _conversion(model)
    conversion.receipt = make_receipt(model, conversion, recording)
    if deviation is not None:
        notes = (f"measured on the example inputs: {deviation}", *conversion.receipt.notes)
        conversion.receipt = replace(conversion.receipt, notes=notes)


def _report_refusals(conversion: Conversion, strict: bool) -> None:
    refused = conversion.receipt.refused
    for row in refused:
        _log.warning("%s asked for %s and got %s: %s", row.site, row.asked, row.got, row.why)
    if strict and (refused or conversion.refused):
        names = [f"{row.site}: asked {row.asked}, got {row.got} ({row.why})" for row in refused]
        names += [f"{fqn}: {reason}" for fqn, reason in conversion.refused.items()]
        raise ConversionError(
            f"{len(names)} sites can't get what the plan asks, and strict=True: {'; '.join(names[:5])}. "
            "Change the plan there, or convert without strict"
        )


def _conversion(model: nn.Module) -> Conversion:
    conversion = vars(model).get(CONVERSION)
    if conversion is None:
        raise UsageError(f"this {type(model).__name__} isn't converted; call autoprec.convert(model) first")
    return conversion


def _check(model: Any, **choices: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("a ScriptModule's forward is compiled already; convert the module it was scripted from")
    for name, allowed in (("level", get_args(Level)), ("mode", get_args(Mode))):
        if choices[name] not in allowed:
            raise UsageError(f"{name}={choices[name]!r} isn't one of {', '.join(allowed)}")
