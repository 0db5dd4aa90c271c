import pytest

from autoprec.errors import UsageError
from autoprec.graph.site import Site
from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule
from autoprec.tune.space import OTHER, build_space

BASE = Plan(
    rules=(
        PlanRule(match=("*::softmax", "head"), formats=Formats.all("fp32"), reason="rule"),
        PlanRule(match=("*::linear", "*::matmul"), formats=Formats.all("bf16"), reason="rule"),
    )
)


def _gpt(blocks: int) -> list[Site]:
    def linear(name: str, num_params: int = 10) -> Site:
        return Site(module=name, op="linear", leaf=True, flops=100, num_params=num_params)

    sites = []
    for k in range(blocks):
        sites += [linear(f"blocks.{k}.qkv"), linear(f"blocks.{k}.up")]
        sites += [Site(module=f"blocks.{k}", op="matmul", index=j, flops=50) for j in range(2)]
        sites += [Site(module=f"blocks.{k}", op="softmax")]
    return [*sites, linear("head")]


def _space(sites, formats=("bf16",), **changes):
    return build_space(sites, BASE, formats, low_format="bf16", **changes)


def _formats(plan: Plan, site: Site) -> str:
    rule = RuleMatcher(plan).rule_for_site(site.scope, site.op, site.index)
    return "none" if rule is None else str(rule.formats)


def test_few_blocks_make_one_group_a_role():
    groups = {g.name: g for g in _space(_gpt(4)).groups}
    assert list(groups) == ["blocks.*.qkv", "blocks.*.up", "blocks.*::matmul", "head", OTHER]
    assert groups["blocks.*.qkv"].match == ("blocks.*.qkv",)
    assert groups["blocks.*::matmul"].match == ("blocks.*::matmul",)
    assert groups["blocks.*::matmul"].num_sites == 8
    assert (groups["blocks.*.up"].rules_choice, groups["head"].rules_choice) == ("bf16", "fp32")
    assert sum(g.flops_share for g in groups.values()) == pytest.approx(1)


def test_many_blocks_make_four_bands_of_depth():
    names = [g.name for g in _space(_gpt(12)).groups if g.name.startswith("blocks.*.qkv")]
    assert names == ["blocks.*.qkv@0-2", "blocks.*.qkv@3-5", "blocks.*.qkv@6-8", "blocks.*.qkv@9-11"]


def test_numbered_layers_of_other_sizes_are_other_roles():
    sites = [Site(module=str(k), op="linear", leaf=True, flops=10, num_params=n) for k, n in ((0, 8), (2, 8), (4, 3))]
    assert [g.name for g in _space(sites).groups] == ["*::linear#8", "4", OTHER]


@pytest.mark.parametrize("blocks", [1, 4, 12])
def test_each_plan_gives_each_group_its_choice_and_nothing_else(blocks):
    sites = _gpt(blocks)
    space = _space(sites)
    for chosen in space.groups[:-1]:
        params = {**space.baselines()["fp32"], OTHER: "rules", chosen.name: "bf16"}
        plan = space.plan_of(params)
        low = [site for site in sites if _formats(plan, site) == "bf16"]
        assert len(low) == chosen.num_sites, chosen
        assert all(_formats(plan, site) == "fp32" for site in sites if site not in low)


def test_the_baselines_are_plans_of_the_space():
    sites = _gpt(2)
    space = _space(sites)
    plans = {name: space.plan_of(params) for name, params in space.baselines().items()}
    assert plans["fp32"].level == "O0"
    assert {_formats(plans["bf16"], site) for site in sites} == {"bf16"}
    assert [_formats(plans["rules"], s) for s in sites] == [_formats(BASE, s) for s in sites]


def test_pins_win_over_every_choice_and_leave_the_space():
    sites = _gpt(2)
    space = _space(sites, keep=["head=fp32", "blocks.0"])
    assert [g.name for g in space.groups] == ["blocks.1.qkv", "blocks.1.up", "blocks.1::matmul", OTHER] or len(
        space.groups
    ) < len(_space(sites).groups)
    plan = space.plan_of(space.baselines()["bf16"])
    assert _formats(plan, sites[-1]) == "fp32"


@pytest.mark.parametrize(
    ("pin", "says"),
    [("head=fp12", "'fp12' is no format"), ("nothing.*=bf16", "matches no site"), ("tail", "matches no site")],
)
def test_a_wrong_pin_is_refused(pin, says):
    with pytest.raises(UsageError, match=says):
        _space(_gpt(1), keep=[pin])


def test_a_model_without_products_is_refused():
    with pytest.raises(UsageError, match="no matrix product"):
        _space([Site(module="", op="add")])


def test_fp8_is_for_linear_layers_and_its_gradients_have_range():
    space = _space(_gpt(1), formats=("fp8_e4m3", "bf16", "tf32", "fp32"))
    choices = {g.name: g.choices for g in space.groups}
    assert choices["blocks.0.qkv"] == ("fp32", "bf16", "fp8_e4m3")
    assert choices["blocks.*::matmul"] == ("fp32", "bf16")
    plan = space.plan_of({**space.baselines()["bf16"], "head": "fp8_e4m3"})
    assert _formats(plan, _gpt(1)[-1]) == "fp8_e4m3/fp8_e4m3/fp8_e5m2"


def test_the_scaler_is_searched_and_enabled_only_with_fp16():
    assert _space(_gpt(1)).scaler_choices == {}
    space = _space(_gpt(1), formats=("fp16", "bf16"))
    assert set(space.scaler_choices) == {"scaler.init_scale", "scaler.growth_interval"}
    assert not space.plan_of(space.baselines()["bf16"]).scaler.enabled
    params = {**space.baselines()["bf16"], "head": "fp16", "scaler.init_scale": 64.0, "scaler.growth_interval": 5}
    scaler = space.plan_of(params).scaler
    assert (scaler.enabled, scaler.init_scale, scaler.growth_interval) == (True, 64.0, 5)


def test_a_model_of_thousands_of_sites_has_few_groups():
    space = _space(_gpt(1000))
    assert len(space.groups) <= 41
    assert sum(g.num_sites for g in space.groups) == 5001
