"""The recipes' settings as parameters of a study: conditional on the formats of a mix, and on the recipe chosen.

Names are ``recipe.<family>`` for the recipe and ``recipe.<family>.<recipe>.<field>`` for its settings.  Fields that
decide which kernel runs, and so the speed, are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from autoprec.recipes import DEFAULTS, RECIPES, Range, Recipe, family_of

_PREFIX = "recipe"
#: Recipes to choose from; those that a kernel of every backend lacks can be pinned in a plan, and aren't tried.
_KINDS = {"fp8": ("current", "delayed", "rowwise"), "mxfp8": ("mxfp8",), "nvfp4": ("nvfp4",)}
_FIELDS = ("power_of_two", "margin", "history_length", "algorithm", "rounding", "hadamard", "stochastic_rounding")
#: Values of a field that is a number.
_STEPS = 3


def families(formats: Iterable[str]) -> tuple[str, ...]:
    """Families of the formats that a recipe scales; integers are scaled by the fp8 one, and have nothing to tune."""
    scaled = [family_of(name) for name in formats if name not in ("int8", "int4")]
    return tuple(sorted({family for family in scaled if family is not None}))


def recipe_choices(used: Iterable[str], params: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Parameters of the families in use, the recipes' fields only of a recipe that is chosen in ``params``."""
    choices: dict[str, tuple[Any, ...]] = {}
    for family in used:
        kinds = _KINDS[family]
        if len(kinds) > 1:
            choices[f"{_PREFIX}.{family}"] = kinds
        chosen = params.get(f"{_PREFIX}.{family}", kinds[0] if len(kinds) == 1 else None)
        if chosen is not None:
            fields = RECIPES[chosen].tunables()
            choices |= {
                f"{_PREFIX}.{family}.{chosen}.{name}": _values(fields[name]) for name in _FIELDS if name in fields
            }
    return choices


def recipe_defaults(base: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter's value before any is known to be better.

    Args:
        base: recipe settings of the plan that rules make.
    """
    values: dict[str, Any] = {}
    for family, kinds in _KINDS.items():
        default = DEFAULTS[family].to_dict() | dict(base.get(family, {}))
        values[f"{_PREFIX}.{family}"] = default["recipe"]
        for kind in kinds:
            recipe = RECIPES[kind]().to_dict() | (default if kind == default["recipe"] else {})
            values |= {f"{_PREFIX}.{family}.{kind}.{name}": recipe[name] for name in _FIELDS if name in recipe}
    return values


def recipe_settings(
    used: Iterable[str], params: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """A plan's recipe settings, by family.

    Args:
        used: families in use.
        params: of a trial.
        base: recipe settings of the plan that rules make, which hold where ``params`` say nothing.
    """
    settings = {family: dict(values) for family, values in base.items()}
    for family in used:
        before = DEFAULTS[family].to_dict() | settings.get(family, {})
        kind = params.get(f"{_PREFIX}.{family}", before["recipe"])
        recipe = before if kind == before["recipe"] else RECIPES[kind]().to_dict()
        stem = f"{_PREFIX}.{family}.{kind}."
        given = {name.removeprefix(stem): value for name, value in params.items() if name.startswith(stem)}
        if given or kind != before["recipe"]:
            settings[family] = _checked(kind, recipe | given).to_dict()
    return settings


def _checked(kind: str, values: Mapping[str, Any]) -> Recipe:
    return RECIPES[kind](**{name: value for name, value in values.items() if name != "recipe"})


def _values(tunable: Any) -> tuple[Any, ...]:
    if not isinstance(tunable, Range):
        return tunable.values
    space = np.geomspace if tunable.log else np.linspace
    grid = space(tunable.low, tunable.high, _STEPS).tolist()
    return tuple(dict.fromkeys(round(v) for v in grid)) if tunable.integer else tuple(grid)
