"""The command line that makes a study again."""

import shlex
from collections.abc import Mapping
from typing import Any

#: Settings of a study that the command line has an option for, in its order, and what they are if left out.
_OPTIONS: dict[str, tuple[str, Any]] = {
    "target": ("--target", None),
    "trials": ("--trials", None),
    "timeout": ("--timeout", None),
    "max_loss_increase": ("--max-loss-increase", None),
    "objective": ("--objective", "speed"),
    "min_speedup": ("--min-speedup", None),
    "method": ("--method", "loop"),
    "workers": ("--workers", 1),
    "trial_timeout": ("--trial-timeout", None),
    "seed": ("--seed", None),
    "keep": ("--keep", None),
    "rules": ("--rules", None),
    "storage": ("--storage", None),
    "study": ("--study", None),
    "output_dir": ("--output-dir", None),
}

#: What a result says of trials that were kept in the study's own process.
_NOT_ISOLATED = "none: asked for"


def command_line(task: str, settings: Mapping[str, Any]) -> str:
    """The command that runs the study again; settings that weren't given are left out."""
    words = ["autoprec", "tune", task]
    for name, (option, default) in _OPTIONS.items():
        value = settings.get(name)
        values = value if isinstance(value, list | tuple) else [] if value in (None, default) else [value]
        words += [word for item in values for word in (option, _written(item))]
    if settings.get("isolate") is False:
        words.append("--no-isolate")
    return shlex.join(words)


def command_of(result: Mapping[str, Any]) -> str:
    """The command line of a result's own settings."""
    given = {"max_loss_increase": f"{100 * result['budget']:g}%", "study": result["study"]}
    settings = {**result["settings"], **given, "isolate": result.get("isolation") != _NOT_ISOLATED}
    return command_line(settings.get("task") or result["task"], settings)


def _written(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
