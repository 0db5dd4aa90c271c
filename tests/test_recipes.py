"""Recipes: plain values that survive JSON, refuse nonsense, and say what can be tuned."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec import recipes
from autoprec.errors import UsageError
from autoprec.formats import FORMATS
from autoprec.recipes import RECIPES, Choices, Range, Recipe, recipe_for, recipe_from_dict


def values_of(tunable: Choices | Range) -> st.SearchStrategy:
    if isinstance(tunable, Choices):
        return st.sampled_from(tunable.values)
    if tunable.integer:
        return st.integers(int(tunable.minimum), int(tunable.high) * 2)
    return st.floats(tunable.minimum, tunable.high * 2)


@st.composite
def any_recipe(draw: st.DrawFn) -> Recipe:
    kind = draw(st.sampled_from([r for r in RECIPES.values() if r.name != "block128"]))
    return kind(**{name: draw(values_of(tunable)) for name, tunable in kind.tunables().items()})


@given(any_recipe())
def test_a_recipe_survives_json(recipe: Recipe) -> None:
    data = json.loads(json.dumps(recipe.to_dict()))
    assert recipe_from_dict(data) == recipe
    assert hash(recipe_from_dict(data)) == hash(recipe)


@pytest.mark.parametrize("kind", RECIPES.values())
def test_every_field_is_tunable_and_its_default_allowed(kind: type[Recipe]) -> None:
    default = kind()
    assert kind.tunables()
    for name, tunable in kind.tunables().items():
        assert tunable.allows(getattr(default, name))
        if isinstance(tunable, Range):
            assert tunable.minimum <= tunable.low < tunable.high
            assert not tunable.log or tunable.low > 0
    assert recipe_from_dict({"recipe": kind.name}) == default
    assert set(kind.role_formats) == {"input", "weight", "grad_output"}
    for names in kind.role_formats.values():
        assert all(recipes.family_of(name) == kind.family for name in names)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "unknown recipe None under the key 'recipe'; known: current, delayed"),
        ({"recipe": ["current"]}, r"unknown recipe \['current'\]"),
        ({"recipe": "currant"}, "unknown recipe 'currant'"),
        ({"recipe": "current", "margin": 1}, "recipe 'current' has no field 'margin'; it has power_of_two, epsilon"),
        ({"recipe": "current", "power_of_two": 1}, "power_of_two=1; allowed: False | True"),
        ({"recipe": "current", "epsilon": float("nan")}, "epsilon=nan; allowed: a number >= 0"),
        ({"recipe": "current", "epsilon": True}, "epsilon=True"),
        ({"recipe": "delayed", "history_length": 0}, "history_length=0; allowed: an integer >= 1"),
        ({"recipe": "delayed", "history_length": 16.0}, "history_length=16.0"),
        ({"recipe": "delayed", "algorithm": "mean"}, "algorithm='mean'; allowed: 'max' | 'most_recent'"),
        ({"recipe": "block128", "input_2d": True}, "input_2d=True, weight_2d=True, grad_2d=False: set one"),
    ],
)
def test_wrong_settings_are_refused_in_words(data: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("|", r"\|")):
        recipe_from_dict(data)


def test_recipe_for_a_gemm() -> None:
    hybrid = ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2")
    assert recipe_for(("bf16", "bf16", "bf16"), {}) is None
    assert recipe_for(hybrid, {}) == recipes.CurrentRecipe()
    assert recipe_for(hybrid, {"fp8": {"recipe": "rowwise"}}) == recipes.RowwiseRecipe()
    assert recipe_for(("mxfp8",) * 3, {"fp8": {"recipe": "rowwise"}}) == recipes.MXFP8Recipe()
    assert recipe_for(("fp8_e4m3", "fp8_e4m3", "bf16"), {}) == recipes.CurrentRecipe()
    with pytest.raises(UsageError, match="can't mix formats of the families fp8 and mxfp8"):
        recipe_for(("fp8_e4m3", "mxfp8", "mxfp8"), {})
    with pytest.raises(UsageError, match="recipe 'nvfp4' scales nvfp4, but stands under the key 'fp8'"):
        recipe_for(hybrid, {"fp8": {"recipe": "nvfp4"}})


def test_every_format_has_a_family_or_needs_no_recipe() -> None:
    unscaled = {name for name in FORMATS if recipes.family_of(name) is None}
    assert unscaled == {"fp32", "tf32", "bf16", "fp16"}


def test_recipes_import_no_library() -> None:
    libraries = ("transformer_engine", "torchao", "optuna")
    code = f"import sys, autoprec.recipes; print([m for m in {libraries} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
