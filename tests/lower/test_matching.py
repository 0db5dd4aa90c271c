"""Which rule of a plan a site falls under."""

import pytest

from autoprec.lower.matching import RuleMatcher
from autoprec.plan import Formats, Plan, PlanRule


def matcher(*rules: tuple[str, str]) -> RuleMatcher:
    return RuleMatcher(Plan(rules=tuple(PlanRule(match=(glob,), formats=Formats.all(fmt)) for glob, fmt in rules)))


@pytest.mark.parametrize(
    ("rules", "site", "expected"),
    [
        # the first rule that matches wins, literal or not
        ([("blocks.0.*", "fp32"), ("blocks.*", "bf16")], ("blocks.0.q", "linear", 0), "fp32"),
        ([("blocks.*", "bf16"), ("blocks.0.q", "fp32")], ("blocks.0.q", "linear", 0), "bf16"),
        # a module glob stands for GEMMs, and for every op if it says fp32
        ([("attn", "bf16")], ("attn", "matmul", 0), "bf16"),
        ([("attn", "bf16")], ("attn", "softmax", 0), None),
        ([("attn", "fp32")], ("attn", "softmax", 0), "fp32"),
        # an op glob names ops, in any module or in one
        ([("*::softmax", "fp32")], ("attn", "softmax", 0), "fp32"),
        ([("*::softmax", "fp32")], ("", "softmax", 0), "fp32"),
        ([("a.*::softmax", "fp32")], ("b.attn", "softmax", 0), None),
        ([("*::conv*", "bf16")], ("stem", "conv2d", 0), "bf16"),
        # a call index takes that call alone
        ([("attn::matmul#1", "fp32"), ("*::matmul", "bf16")], ("attn", "matmul", 1), "fp32"),
        ([("attn::matmul#1", "fp32"), ("*::matmul", "bf16")], ("attn", "matmul", 0), "bf16"),
        # a method has a scope of its own; a module glob takes it too
        ([("vae:encode::matmul", "fp32")], ("vae:encode", "matmul", 0), "fp32"),
        ([("vae:encode::matmul", "fp32")], ("vae", "matmul", 0), None),
        ([("vae", "fp32")], ("vae:encode", "matmul", 0), "fp32"),
        # no glob reaches past its module
        ([("head", "fp32")], ("heads", "linear", 0), None),
        ([], ("head", "linear", 0), None),
    ],
)
def test_rule_of_a_site(rules, site, expected):
    rule = matcher(*rules).rule_for_site(*site)
    assert (rule and rule.formats.input) == expected


def test_thousands_of_literal_rules_match_as_the_few_do():
    rules = [(f"blocks.{k}.mlp", "bf16") for k in range(3000)]
    found = matcher(*rules, ("*", "fp32"))
    assert found.rule_for_site("blocks.2999.mlp", "linear", 0).match == ("blocks.2999.mlp",)
    assert found.rule_for_site("blocks.3000.mlp", "linear", 0).match == ("*",)
