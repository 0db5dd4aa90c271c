"""The loader: overrides, and an error with file, key, value and the allowed for all that can be wrong."""

import dataclasses

import pytest

from autoprec.errors import RuleError
from autoprec.graph.site import Site
from autoprec.rulebook import (
    canonical_op,
    check_rules_match,
    families_of,
    kept_sites,
    known_ops,
    list_rules,
    load_rulebook,
    show_rule,
)
from autoprec.rulebook import test_rules as rules_of_files
from autoprec.rulebook.globs import covers

OP = '[[op]]\nnames = ["{name}"]\nkind = "{kind}"\nwhy = "mine"\n'
SITE = '[[site]]\nmatch = "{match}"\nformat = "{format}"\nwhy = "mine"\n'


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_shipped_rules_load():
    rulebook = load_rulebook()
    assert rulebook.files == ("ops.toml", "families.toml", "scaler.toml")
    assert rulebook.rule_for("linear").kind == "low"
    assert rulebook.rule_for("softmax").kind == "fp32"
    assert rulebook.rule_for("index_put").dtype == "destination"
    assert rulebook.rule_for("an op that nobody names").kind == "follow"


def test_the_documented_example_loads(write):
    import textwrap

    example = textwrap.dedent(load_rulebook.__doc__.split("for example::")[1].split("Args:")[0])
    rulebook = load_rulebook(write(example))
    assert rulebook.plan_rules[0].match == ("head", "blocks.*.attn::softmax")
    assert rulebook.rule_for("cumsum").kind == "follow"


def test_user_op_rule_wins_and_later_file_wins(write):
    first = write(OP.format(name="softmax", kind="low"), "first.toml")
    second = write(OP.format(name="softmax", kind="follow"), "second.toml")
    assert load_rulebook(first).ops["softmax"].kind == "low"
    assert load_rulebook(first, second).ops["softmax"].kind == "follow"
    assert load_rulebook(second, first).ops["softmax"].kind == "low"
    assert load_rulebook().ops["softmax"].kind == "fp32"


def test_no_caller_can_change_the_rules_of_another():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_rulebook().ops["softmax"].kind = "low"
    changed = load_rulebook()
    changed.ops.clear()
    assert load_rulebook().ops


def test_site_rules_become_plan_rules_later_files_first(write):
    first = write(SITE.format(match="head", format="fp32"), "first.toml")
    second = write(
        '[[site]]\nmatch = ["a", "b"]\ninput = "fp8_e4m3"\nweight = "fp8_e4m3"\ngrad_output = "fp8_e5m2"\nwhy = "x"\n'
    )
    rules = load_rulebook(first, second).plan_rules
    assert [rule.match for rule in rules] == [("a", "b"), ("head",)]
    assert str(rules[0].formats) == "fp8_e4m3/fp8_e4m3/fp8_e5m2"
    assert {rule.source for rule in rules} == {"user"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OP.format(name="sofmax", kind="fp32"), r"mine\.toml: \[\[op\]\] 1: names = 'sofmax' isn't an op.*softmax"),
        (OP.format(name="softmax", kind="fp16"), r"kind = 'fp16' isn't one of fixed, follow, fp32, low"),
        (OP.format(name="softmax", kind="fixed"), r"dtype = '' with kind = 'fixed'"),
        (OP.format(name="softmax", kind="fp32") * 2, r"\[\[op\]\] 2: names 'softmax', which an earlier"),
        (
            OP.format(name="mul", kind="fp32") + OP.format(name="__imul__", kind="low"),
            r"names '__imul__', which an earlier \[\[op\]\] of this file gives kind 'fp32'",
        ),
        (OP.format(name="softmax", kind="fp32") + 'guard = "fill"\n', r"guard = 'fill' with kind = 'fp32'"),
        (OP.format(name="softmax", kind="fp32") + "colour = 1\n", r"unknown key 'colour'; allowed: dtype, guard"),
        ('[[op]]\nnames = []\nkind = "low"\nwhy = "x"\n', r"names = \[\] must be a non-empty"),
        ('[[op]]\nnames = ["mul"]\nkind = "low"\n', r"why is missing"),
        ("op = 3\n", r"op = 3 must be tables"),
        ("[[ops]]\n", r"unknown key 'ops'; allowed: family, op, scaler, site"),
        ("op = [\n", r"isn't TOML"),
        (SITE.format(match="a", format="fp9"), r"format = 'fp9' isn't one of .*fp8_e4m3"),
        (SITE.format(match="a", format="fp32") + 'weight = "bf16"\n', r"format and weight: give one format"),
        ('[[site]]\nmatch = "a"\ninput = "bf16"\nwhy = "x"\n', r"weight is missing"),
        (
            SITE.format(match="a.*", format="fp32") + SITE.format(match="a.*", format="bf16"),
            r"\[\[site\]\] 2: match = 'a\.\*' clashes with an earlier",
        ),
        (
            SITE.format(match="a.*", format="fp32") + SITE.format(match="a.b.c", format="bf16"),
            r"match = 'a\.b\.c' can never match: the earlier 'a\.\*' takes all",
        ),
        (SITE.format(match="a::sofmax", format="fp32"), r"match = 'sofmax' isn't an op.*softmax"),
        (
            SITE.format(match="a::masked_fill_#0", format="fp32"),
            r"can never match: a site calls 'masked_fill_' 'masked_fill'",
        ),
        ('[[family]]\nname = "x"\nwhy = "x"\n', r"can never match: give classes or ops"),
        (
            '[[family]]\nname = "x"\nops = ["mul"]\nwhy = "x"\n[[family.keep]]\nprecision = "high"\nwhy = "x"\n',
            r"\[\[family\]\] 1 \[\[keep\]\] 1: would match every site",
        ),
        (
            '[[scaler]]\ninit_scale = 4\ngrowth_interval = 1\nmin_scale = 8\nwhy = "x"\n',
            r"init_scale=4.0 must be between",
        ),
        ('[[scaler]]\ninit_scale = true\ngrowth_interval = 1\nwhy = "x"\n', r"init_scale = True must be a number"),
        ('[[scaler]]\nbelow_params = 5\ninit_scale = 4\ngrowth_interval = 1\nwhy = "x"\n', r"the last \[\[scaler\]\]"),
        ('[[scaler]]\ninit_scale = 4\ngrowth_interval = 1.5\nwhy = "x"\n', r"growth_interval = 1.5 must be a whole"),
    ],
)
def test_wrong_file_is_an_error_that_says_so(write, text, message):
    with pytest.raises(RuleError, match=message) as caught:
        load_rulebook(write(text))
    assert "mine.toml" in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(RuleError, match="can't be read"):
        load_rulebook(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(RuleError, match="isn't UTF-8"):
        load_rulebook(binary)
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(RuleError, match="too many"):
        load_rulebook(huge)


def test_site_rule_that_matches_no_site(write):
    sites = [Site(module="head", op="linear", leaf=True), Site(module="attn", op="softmax")]
    check_rules_match(load_rulebook(write(SITE.format(match="he*", format="fp32"))), sites)
    check_rules_match(load_rulebook(write(SITE.format(match="attn::softmax", format="fp32"))), sites)
    with pytest.raises(RuleError, match=r"mine\.toml.*'haed' matches none.*near it: head"):
        check_rules_match(load_rulebook(write(SITE.format(match="haed", format="fp32"))), sites)


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("*", "a.b", True),
        ("a.*", "a.b.*", True),
        ("a.*", "a.?", True),
        ("a.?", "a.*", False),
        ("a.*", "*.b", False),
        ("a.?", "a.b", True),
        ("a.[bc]", "a.b", True),
        ("a.b", "a.[bc]", False),
        ("*::softmax", "a*::softmax", True),
    ],
)
def test_covers(wide, narrow, expected):
    assert covers(wide, narrow) is expected


@pytest.mark.parametrize(
    ("spelling", "op"),
    [
        ("__matmul__", "matmul"), ("__rmatmul__", "matmul"), ("__imul__", "mul"), ("__rpow__", "pow"), ("mul_", "mul"),
        ("masked_fill_", "masked_fill"), ("__setitem__", "index_put"), ("index_put_", "index_put"), ("__rdiv__", "div"),
        ("true_divide_", "div"), ("special_softmax", "softmax"), ("softmax", "softmax"), ("__len__", "__len__"),
    ],
)  # fmt: skip
def test_canonical_op(spelling, op):
    assert canonical_op(spelling) == op


def test_folding_is_stable():
    names = {*known_ops(), *load_rulebook().ops}
    assert {canonical_op(canonical_op(name)) for name in names} == {canonical_op(name) for name in names}
    assert {canonical_op(name) for name in load_rulebook().ops} == set(load_rulebook().ops)


def test_rules_list_show_test(write):
    mine = write(SITE.format(match="head", format="fp32") + OP.format(name="softmax", kind="low"))
    rulebook = load_rulebook(mine)
    assert list_rules(rulebook)[0].name == "head"
    assert show_rule(rulebook, "torch.softmax")[0].effect == "low"
    assert {row.table for row in show_rule(rulebook, "moe")} == {"family"}
    assert [(row.table, row.name) for row in rules_of_files(mine)] == [("site", "head"), ("op", "softmax")]
    with pytest.raises(RuleError, match="no rule names 'nonsense'"):
        show_rule(rulebook, "nonsense")


def test_scaler_prior_by_size():
    rulebook = load_rulebook()
    sizes = [3_000_000, 99_999_999, 100_000_000, 1_000_000_000, 70_000_000_000]
    assert [rulebook.scaler_for(size).settings.init_scale for size in sizes] == [1024, 1024, 4096, 65536, 65536]


def linear(name):
    return Site(module=name, op="linear", leaf=True)


def test_families_keep_head_blocks_and_router():
    classes = {"": "Model", "lm_head": "Linear", "embed": "Embedding"}
    sites = []
    for block in range(5):
        classes |= {f"layers.{block}": "Block", f"layers.{block}.attn": "SelfAttention"}
        classes |= {
            f"layers.{block}.attn.q": "Linear",
            f"layers.{block}.mlp.gate": "Linear",
            f"layers.{block}.mlp": "MoE",
        }
        sites += [
            linear(f"layers.{block}.attn.q"),
            Site(module=f"layers.{block}.attn", op="matmul"),
            linear(f"layers.{block}.mlp.gate"),
        ]
    sites.append(linear("lm_head"))
    families = families_of(load_rulebook(), classes.values(), [site.op for site in sites])
    assert [family.name for family in families] == ["transformer", "moe"]
    transformer, moe = families
    kept = {site.id: rule.precision for site, rule in kept_sites(transformer, sites, classes)}
    assert kept.keys() == {
        "layers.0.attn.q", "layers.0.mlp.gate", "layers.4.attn.q", "layers.4.mlp.gate", "lm_head",
        *(f"layers.{block}.attn::matmul#0" for block in range(5)),
    }  # fmt: skip
    assert set(kept.values()) == {"high"}
    routers = {site.id: rule.precision for site, rule in kept_sites(moe, sites, classes)}
    assert routers == {f"layers.{block}.mlp.gate": "fp32" for block in range(5)}


def test_short_model_keeps_no_block_and_cnn_keeps_first_and_last():
    classes = {"": "Net", "c": "Sequential", "c.0": "Conv2d", "c.1": "BatchNorm2d", "c.2": "Conv2d", "fc": "Linear"}
    sites = [
        Site(module="c.0", op="conv2d", leaf=True),
        Site(module="c.1", op="instance_norm", leaf=True),
        Site(module="c.2", op="conv2d", leaf=True),
        linear("fc"),
    ]
    (cnn,) = families_of(load_rulebook(), classes.values(), [site.op for site in sites])
    assert [(site.id, rule.precision) for site, rule in kept_sites(cnn, sites, classes)] == [
        ("c.0", "high"),
        ("c.1", "fp32"),
        ("fc", "high"),
    ]
    assert families_of(load_rulebook(), ["Linear", "ReLU"], ["linear"]) == ()
