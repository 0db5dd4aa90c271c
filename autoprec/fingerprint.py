"""What a model looks like to a plan: classes, names, shapes and ties, but no weights.

The same before and after a conversion, on the meta device, and at any storage precision.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoprec.errors import PlanMismatchError
from autoprec.plan import Plan

#: Differences that a message names; more are counted.
NUM_SHOWN = 5

#: A damaged file may say ``blocks.[0-99999999999].q``.
MAX_MODULES = 1_000_000

_RANGE = re.compile(r"\[(\d{1,12})-(\d{1,12})\]")


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Structure of a model as JSON values.

    Args:
        model: any module; its weights aren't read.

    Returns:
        ``hash``: 16 hex digits over the structure. ``model``: the class, for a reader; not compared, since the same
        model is ``__main__.GPT`` in a script and ``train.GPT`` elsewhere. ``modules``: FQN → class, parameters and
        persistent buffers with shapes, where repeated blocks are folded to ``blocks.[0-11].attn.q``. ``ties``: names
        of one and the same parameter.
    """
    modules, ties = _modules(model), _ties(model)
    return {
        "hash": _hash(modules, ties),
        "model": f"{type(model).__module__}.{type(model).__name__}",
        "modules": _fold(modules),
        "ties": ties,
    }


def check_fingerprint(plan: Plan, model: nn.Module) -> None:
    """Refuse a model other than the one a plan was made for; a plan without fingerprint fits any.

    Raises:
        PlanMismatchError: naming the modules, shapes and ties that differ.
    """
    if not plan.fingerprint:
        return
    modules, ties = _modules(model), _ties(model)
    present = _hash(modules, ties)
    if plan.fingerprint.get("hash") == present:
        return
    differences = [*_differences(_unfold(plan.fingerprint), modules), *_tie_differences(plan.fingerprint, ties)]
    listed = "".join(f"\n  {line}" for line in differences[:NUM_SHOWN])
    if len(differences) > NUM_SHOWN:
        listed += f"\n  and {len(differences) - NUM_SHOWN} more"
    raise PlanMismatchError(
        f"the plan was made for {plan.fingerprint.get('model', 'another model')} with fingerprint "
        f"{plan.fingerprint.get('hash')}, and this {type(model).__name__} has {present}:"
        f"{listed or ' its record of the modules is damaged'}\n"
        "Build the model the plan was made for, or make a plan for this one. To apply the plan's globs to this model "
        "all the same, delete the plan's fingerprint and sha256."
    )


def _hash(modules: dict[str, str], ties: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps([modules, ties], sort_keys=True).encode()).hexdigest()[:16]


def _modules(model: nn.Module) -> dict[str, str]:
    # a conversion makes an instance's class a subclass of the same name; it keeps the names and objects of parameters
    return {name: _describe(module) for name, module in model.named_modules()}


def _describe(module: nn.Module) -> str:
    held = [f"{name}: {_shape(p)}" for name, p in module._parameters.items() if p is not None]
    # compiled code keeps no record of which buffers are saved
    hidden = set() if isinstance(module, torch.jit.ScriptModule) else module._non_persistent_buffers_set
    persistent = (n for n in module._buffers.keys() if n not in hidden)  # noqa: SIM118  (a script's wrapper can't be iterated)
    for name in persistent:
        buffer = module._buffers[name]
        if buffer is not None:
            held.append(f"{name}: {_shape(buffer)}")
    return f"{type(module).__name__}({', '.join(held)})"


def _shape(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "not yet shaped"
    # one model may be stored in fp32 here and in bf16 there
    kind = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind}[{', '.join(map(str, tensor.shape))}]"


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{module_name}.{name}" if module_name else name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def _fold(modules: dict[str, str]) -> dict[str, str]:
    """Consecutive numbers in one place of otherwise equal names become a range, outermost place first."""
    depth = max(name.count(".") for name in modules) + 1
    entries = {tuple(name.split(".")): text for name, text in modules.items()}
    for place in range(depth):
        runs: dict[tuple[Any, ...], list[int]] = {}
        for parts, text in entries.items():
            number = (
                int(parts[place]) if place < len(parts) and re.fullmatch(r"0|[1-9]\d{0,11}", parts[place]) else None
            )
            key = (parts[:place], parts[place + 1 :] if number is not None else parts[place:], number is None, text)
            runs.setdefault(key, []).append(-1 if number is None else number)
        entries = {
            (*head, *((part,) if part else ()), *tail): text
            for (head, tail, _, text), numbers in runs.items()
            for part in _ranges(sorted(numbers))
        }
    return {".".join(parts): text for parts, text in entries.items()}


def _ranges(numbers: list[int]) -> Iterator[str]:
    """``0 1 2 5`` → ``[0-2] 5``; a lone -1, which stands for "no number here", → an empty string."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            first, last = numbers[start], numbers[end - 1]
            yield "" if first < 0 else f"[{first}-{last}]" if last > first else str(first)
            start = end


def _unfold(recorded: dict[str, Any]) -> dict[str, str]:
    """The names of a recorded fingerprint one by one; empty where the record isn't one that ``fingerprint`` makes."""
    folded = recorded.get("modules")
    if not isinstance(folded, dict):
        return {}
    modules: dict[str, str] = {}
    for name, text in folded.items():
        if not isinstance(text, str):
            return {}
        count = 1
        for first, last in _RANGE.findall(name):
            count *= max(0, int(last) - int(first) + 1)
        if count + len(modules) > MAX_MODULES:
            return {}
        modules.update((expanded, text) for expanded in _expand(name))
    return modules


def _expand(name: str) -> Iterator[str]:
    found = _RANGE.search(name)
    if not found:
        yield name
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        for rest in _expand(name[found.end() :]):
            yield f"{name[: found.start()]}{number}{rest}"


def _differences(planned: dict[str, str], present: dict[str, str]) -> Iterator[str]:
    if not planned:
        return
    for name in {**planned, **present}:
        shown, parent = name or "the root", name.rpartition(".")[0]
        # of a part that one of them lacks, its topmost module says enough
        if name not in present:
            if parent in present:
                yield f"{shown}: {planned[name]} in the plan, missing in the model"
        elif name not in planned:
            if parent in planned:
                yield f"{shown}: {present[name]} in the model, not in the plan"
        elif planned[name] != present[name]:
            yield f"{shown}: {planned[name]} in the plan, {present[name]} in the model"


def _tie_differences(recorded: dict[str, Any], present: list[list[str]]) -> Iterator[str]:
    planned = recorded.get("ties")
    if not isinstance(planned, list):
        return
    yield from (f"not tied in the model: {_tie(group)}" for group in planned if group not in present)
    yield from (f"tied in the model only: {_tie(group)}" for group in present if group not in planned)


def _tie(group: Any) -> str:
    return " = ".join(map(str, group)) if isinstance(group, list) else str(group)
