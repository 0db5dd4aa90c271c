"""The plan as a whole: the order of its rules, the user's word, and models too large for this machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autoprec
from autoprec.analyze import analyze
from autoprec.errors import RuleError, UsageError
from autoprec.lower.matching import RuleMatcher
from autoprec.planner.rules import keep_rules, low_format, plan_by_rules
from autoprec.rulebook import load_rulebook
from autoprec.target import load_target

ROOT = Path(__file__).parents[2]
SITE = '[[site]]\nmatch = ["{match}"]\nformat = "fp32"\nwhy = "as I say"\n'


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x):
        return self.head(torch.softmax(self.body(x), -1))


def with_rule(tmp_path, match):
    path = tmp_path / "mine.toml"
    path.write_text(SITE.format(match=match))
    return load_rulebook(path)


@pytest.mark.parametrize("match", ["body", "bo*", "::softmax", "*::softmax#0", "body::linear"])
def test_a_users_rule_wins(tmp_path, match):
    rulebook, target = with_rule(tmp_path, match), load_target("h100")
    plan = plan_by_rules(Net(), target, rulebook, analysis=analyze(Net(), torch.randn(4, 32), target=target))
    assert plan.rules[0].match == (match,)
    scope, op = ("", "softmax") if "softmax" in match else ("body", "linear")
    assert RuleMatcher(plan).rule_for_site(scope, op, 0).reason == "as I say"


def test_a_users_rule_may_name_the_module_around_its_sites(tmp_path):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x)[0]

    model, target = Outer(), load_target("a100")
    analysis = analyze(model, torch.randn(2, 3, 16), target=target)
    plan_by_rules(model, target, with_rule(tmp_path, "inner"), analysis=analysis)


def test_a_users_rule_that_matches_nothing_is_an_error_once_sites_are_known(tmp_path):
    rulebook, target = with_rule(tmp_path, "hed"), load_target("h100")
    plan_by_rules(Net(), target, rulebook)
    with pytest.raises(RuleError, match=r"'hed' matches none.*near it: head"):
        plan_by_rules(Net(), target, rulebook, analysis=analyze(Net(), torch.randn(4, 32), target=target))


def test_a_users_rule_that_matches_nothing_is_an_error_at_o0_too(tmp_path):
    target = load_target("h100")
    with pytest.raises(RuleError):
        plan_by_rules(
            Net(),
            target,
            with_rule(tmp_path, "hed"),
            analysis=analyze(Net(), torch.randn(4, 32), target=target),
            level="O0",
        )


@pytest.mark.parametrize(
    ("target", "level", "cap", "low"),
    [
        ("h100", "O1", None, "bf16"),
        ("v100", "O1", None, "fp16"),
        ("cpu", "O1", None, "fp32"),
        ("h100", "O0", None, "fp32"),
        ("h100", "O1", "fp16", "fp16"),
        ("h100", "O1", "tf32", "fp32"),
        ("h100", "O2", "fp8_e4m3", "bf16"),
    ],
)
def test_low_format(target, level, cap, low):
    assert low_format(load_target(target), level, cap) == low


def test_tf32_is_for_layers_alone_and_only_where_the_device_has_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.norm, self.head = nn.Conv1d(8, 16, 3), nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            x = self.norm(self.conv(x).transpose(1, 2))
            return self.head(x) @ x.transpose(1, 2)

    x = torch.randn(2, 8, 10)
    receipt = autoprec.receipt(autoprec.convert(Net(), target="a100", formats="tf32", example_inputs=x))
    assert {row.site: row.got for row in receipt} == {
        "conv": "tf32", "head": "tf32", "norm": "fp32", "::matmul#0": "fp32", "::transpose#0": "fp32",
        "::transpose#1": "fp32",
    }  # fmt: skip
    assert not receipt.refused
    for target in ("v100", "cpu"):
        assert autoprec.plan_of(autoprec.convert(Net(), target=target, formats="tf32")).rules == ()


def test_a_format_the_target_lacks_is_refused():
    with pytest.raises(UsageError, match="isn't a format of a100; allowed: fp32, tf32, bf16, fp16"):
        low_format(load_target("a100"), "O1", "fp8_e4m3")


def test_pins():
    (first, second) = keep_rules(["head=fp32", "*.attn.*=bf16"])
    assert (first.match, first.formats.input, first.source) == (("head",), "fp32", "user")
    assert second.match == ("*.attn.*",)
    for bad in ("head", "=fp32", "head="):
        with pytest.raises(UsageError):
            keep_rules([bad])


LARGE = """
import resource
import torch
from torch import nn
from autoprec.planner.rules import plan_by_rules
from autoprec.rulebook import load_rulebook
from autoprec.target import load_target

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleDict({"q": nn.Linear(8192, 8192), "k": nn.Linear(8192, 1024),
                                        "v": nn.Linear(8192, 1024), "o": nn.Linear(8192, 8192)})
        self.gate, self.up, self.down = nn.Linear(8192, 28672), nn.Linear(8192, 28672), nn.Linear(28672, 8192)

with torch.device("meta"):
    model = nn.Sequential(nn.Embedding(128256, 8192), *(Layer() for _ in range(80)), nn.Linear(8192, 128256))
assert sum(p.numel() for p in model.parameters()) > 70e9
plan = plan_by_rules(model, load_target("h100"), load_rulebook())
print(len(plan.rules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_70e9_parameters_are_planned_in_little_memory():
    done = subprocess.run(
        [sys.executable, "-c", LARGE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    num_rules, peak_bytes = map(int, done.stdout.split())
    assert num_rules < 60
    assert peak_bytes < 4 * 2**30
