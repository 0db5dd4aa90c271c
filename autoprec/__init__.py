"""autoprec finds the fastest precision mix that keeps a PyTorch model's loss, and carries it as one JSON file.

    model = autoprec.convert(model, target="h100", example_inputs=batch)
    result = autoprec.tune(task, target="auto", trials=50)
    result.plan.save("plan.json")
    model = autoprec.convert(model, plan="plan.json")

Names are imported when they are first used, so that ``import autoprec`` costs nothing.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.analyze import Analysis, analyze
    from autoprec.convert import Receipt, convert, plan_of, receipt, revert
    from autoprec.errors import (
        AutoprecError,
        BackendError,
        ConversionError,
        MissingExtraError,
        NonFiniteError,
        PlanError,
        PlanFileError,
        PlanMismatchError,
        RuleError,
        StudyError,
        TargetError,
        TaskError,
        TrainingError,
        UsageError,
    )
    from autoprec.plan import Formats, Plan, PlanRule, ScalerSettings
    from autoprec.planfile import load_plan
    from autoprec.target import Target, list_targets, load_target
    from autoprec.tasks import Task
    from autoprec.tune import TuneResult, tune
    from autoprec.tune.answers.settle import settle

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "AutoprecError",
    "BackendError",
    "ConversionError",
    "Formats",
    "MissingExtraError",
    "NonFiniteError",
    "Plan",
    "PlanError",
    "PlanFileError",
    "PlanMismatchError",
    "PlanRule",
    "Receipt",
    "RuleError",
    "ScalerSettings",
    "StudyError",
    "Target",
    "TargetError",
    "Task",
    "TaskError",
    "TrainingError",
    "TuneResult",
    "UsageError",
    "analyze",
    "convert",
    "list_targets",
    "load_plan",
    "load_target",
    "plan_of",
    "receipt",
    "revert",
    "settle",
    "tune",
]

_HOMES = {
    "analyze": ("Analysis", "analyze"),
    "convert": ("Receipt", "convert", "plan_of", "receipt", "revert"),
    "plan": ("Formats", "Plan", "PlanRule", "ScalerSettings"),
    "planfile": ("load_plan",),
    "target": ("Target", "list_targets", "load_target"),
    "tasks": ("Task",),
    "tune": ("TuneResult", "tune"),
    "tune.answers.settle": ("settle",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = "errors" if name.endswith("Error") else _HOME_OF.get(name)
    if home is None or name not in __all__:
        raise AttributeError(f"module 'autoprec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"autoprec.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """A package whose functions ``convert``, ``analyze`` and ``tune`` aren't hidden by the modules of those names.

    Python sets a submodule as an attribute of its package when it is first imported, by whomever; ``autoprec.tune``
    would then be a function or a module, depending on who came first.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
