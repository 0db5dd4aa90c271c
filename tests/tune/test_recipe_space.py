import pytest

from autoprec.graph.site import Site
from autoprec.plan import Plan
from autoprec.planner.problem import Option, Problem, ProblemGroup
from autoprec.recipes import recipe_from_dict
from autoprec.tune.recipe_space import families, recipe_choices, recipe_defaults, recipe_settings
from autoprec.tune.space import build_space

FP8_RECIPE = "recipe.fp8"


def _space(formats=("fp8_e4m3", "nvfp4", "bf16", "fp16")):
    sites = [Site(module=name, op="linear", leaf=True, flops=10, num_params=n) for name, n in (("a", 1), ("b", 2))]
    return build_space(sites, Plan(rules=()), formats, low_format="bf16")


def _mix(space, a: str, b: str) -> dict[str, str]:
    return {"a": a, "b": b, space.groups[-1].name: "rules"}


def test_only_families_of_the_mix_have_settings():
    space = _space()
    assert space.settings(_mix(space, "bf16", "fp32")) == {}
    assert set(space.settings(_mix(space, "fp8_e4m3", "bf16"))) == {FP8_RECIPE}
    names = set(space.settings(_mix(space, "nvfp4", "bf16")))
    assert names == {"recipe.nvfp4.nvfp4.hadamard", "recipe.nvfp4.nvfp4.stochastic_rounding"}
    assert set(space.settings(_mix(space, "fp16", "bf16"))) == {"scaler.init_scale", "scaler.growth_interval"}


def test_a_recipes_fields_come_with_the_recipe():
    chosen = recipe_choices(["fp8"], {FP8_RECIPE: "delayed"})
    assert chosen["recipe.fp8.delayed.algorithm"] == ("max", "most_recent")
    assert chosen["recipe.fp8.delayed.history_length"] == (16, 128, 1024)
    assert "recipe.fp8.current.power_of_two" not in chosen


def test_defaults_are_among_the_values_and_change_nothing():
    space = _space()
    defaults = space.defaults()
    params: dict = _mix(space, "fp8_e4m3", "nvfp4")
    plain = space.plan_of(params)
    while missing := {n: v for n, v in space.settings(params).items() if n not in params}:
        for name, values in missing.items():
            assert defaults[name] in values, name
            params[name] = defaults[name]
    settled = space.plan_of(params)
    for family, recipe in settled.recipe.items():
        default = recipe_settings([family], {}, {}).get(family)
        assert default is None
        assert recipe == recipe_from_dict(plain.recipe.get(family, recipe)).to_dict()


def test_a_plan_has_what_was_chosen():
    space = _space()
    params = _mix(space, "fp8_e4m3", "bf16") | {FP8_RECIPE: "delayed", "recipe.fp8.delayed.margin": 2}
    recipe = space.plan_of(params).recipe["fp8"]
    assert (recipe["recipe"], recipe["margin"]) == ("delayed", 2)
    recipe_from_dict(recipe)
    assert "fp8" not in space.plan_of(_mix(space, "bf16", "bf16") | {FP8_RECIPE: "delayed"}).recipe


def test_the_rules_own_recipe_is_the_default():
    base = {"fp8": {"recipe": "rowwise", "power_of_two": False}}
    defaults = recipe_defaults(base)
    assert defaults[FP8_RECIPE] == "rowwise"
    assert defaults["recipe.fp8.rowwise.power_of_two"] is False
    assert recipe_settings(["fp8"], {}, base) == base


@pytest.mark.parametrize(("formats", "found"), [(("bf16",), ()), (("mxfp8", "fp8_e5m2", "int8"), ("fp8", "mxfp8"))])
def test_families(formats, found):
    assert families(formats) == found


def test_choices_that_cannot_win_are_dropped():
    space = _space()
    seconds = {"a": {"fp8_e4m3": 0.3, "nvfp4": 0.2}, "b": {"fp8_e4m3": 0.7, "nvfp4": 0.69}}
    harms = {"fp32": 0.0, "bf16": 1e-6, "fp16": 2e-6, "fp8_e4m3": 1e-3, "nvfp4": 1e-2, "rules": 0.0}
    groups = tuple(
        ProblemGroup(
            name=g.name,
            options=tuple(
                Option(
                    format=f,
                    harm=harms[f],
                    cost_s=seconds.get(g.name, {}).get(f, {"fp32": 1.0, "bf16": 0.5}.get(f, 0.5)),
                )
                for f in g.choices
            ),
        )
        for g in space.groups
    )
    pruned = space.pruned(Problem(groups=groups))
    choices = {g.name: g.choices for g in pruned.groups}
    assert set(choices["a"]) == {"fp32", "bf16", "fp16", "fp8_e4m3", "nvfp4"}  # fp16 is within the margin
    assert set(choices["b"]) == {"fp32", "bf16", "fp16"}
    assert pruned.baselines() == space.baselines()
