"""The fingerprint: what it sees, what it doesn't, and how a mismatch is told."""

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoprec import convert, revert
from autoprec.errors import PlanMismatchError
from autoprec.fingerprint import _fold, _unfold, check_fingerprint, fingerprint
from autoprec.plan import Plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in "qkv"})
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.register_buffer("mask", torch.ones(3, 3), persistent=False)


class GPT(nn.Module):
    def __init__(self, depth: int = 12, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def plan_for(model: nn.Module) -> Plan:
    return Plan.from_json(Plan(rules=(), fingerprint=fingerprint(model)).to_json())


def refusal(plan: Plan, model: nn.Module) -> str:
    with pytest.raises(PlanMismatchError) as caught:
        check_fingerprint(plan, model)
    return str(caught.value)


def test_it_is_short_json_with_repeated_blocks_folded():
    found = fingerprint(GPT())
    assert json.loads(json.dumps(found)) == found
    assert len(found["hash"]) == 16
    assert found["modules"] == {
        "": "GPT()",
        "embed": "Embedding(weight: float[20, 8])",
        "blocks": "ModuleList()",
        "blocks.[0-11]": "Block()",
        "blocks.[0-11].attn": "ModuleDict()",
        **{f"blocks.[0-11].attn.{n}": "Linear(weight: float[8, 8], bias: float[8])" for n in "qkv"},
        "blocks.[0-11].mlp": "Sequential()",
        "blocks.[0-11].mlp.0": "Linear(weight: float[16, 8], bias: float[16])",
        "blocks.[0-11].mlp.1": "GELU()",
        "blocks.[0-11].mlp.2": "Linear(weight: float[8, 16], bias: float[8])",
        "norm": "BatchNorm1d(weight: float[8], bias: float[8], running_mean: float[8], running_var: float[8], "
        "num_batches_tracked: int64[])",
        "head": "Linear(weight: float[20, 8])",
    }
    assert found["ties"] == [["embed.weight", "head.weight"]]


def subclassed(model: nn.Module) -> nn.Module:
    """As a conversion leaves a model: same-named subclasses, private state, other storage."""
    for module in model.modules():
        cls = type(module)
        module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        module._private = object()
    return model


def on_meta(_: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return GPT()


@pytest.mark.parametrize(
    "change",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        on_meta,
        lambda m: m.bfloat16(),
        lambda m: m.half().eval().requires_grad_(False),
        subclassed,
        lambda m: [m.blocks[0].register_buffer("mask", torch.ones(9, 9), persistent=False), m][1],
        lambda m: [nn.init.ones_(m.embed.weight), m][1],
    ],
    ids=["deepcopy", "pickle", "meta", "bf16", "half eval frozen", "converted", "scratch buffer", "weights"],
)
def test_what_a_plan_does_not_depend_on_is_not_in_it(change):
    plan, changed = plan_for(GPT()), change(GPT())
    assert fingerprint(changed)["hash"] == plan.fingerprint["hash"]
    check_fingerprint(plan, changed)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_conversion_changes_nothing_that_it_sees(level):
    model = GPT()
    before = fingerprint(model)
    convert(model, target="a100", level=level)
    assert fingerprint(model) == before
    revert(model)
    assert fingerprint(model) == before


def test_the_same_model_defined_in_a_script_fits():
    script = type("GPT", (GPT,), {"__module__": "__main__"})
    check_fingerprint(plan_for(GPT()), script())


def test_a_plan_without_fingerprint_fits_any_model():
    check_fingerprint(Plan(rules=()), GPT())


def test_another_depth_names_the_first_block_that_differs():
    assert (
        "blocks.3: Block() in the plan, missing in the model\n  blocks.4: Block() in the plan, missing in the model\n"
    ) in refusal(plan_for(GPT(5)), GPT(3))
    assert "blocks.3: Block() in the model, not in the plan\nBuild" in refusal(plan_for(GPT(3)), GPT(4))


def test_another_width_names_both_shapes_and_counts_the_rest():
    text = refusal(plan_for(GPT()), GPT(width=16))
    assert "embed: Embedding(weight: float[20, 8]) in the plan, Embedding(weight: float[20, 16]) in the model" in text
    assert "and 58 more" in text
    assert "GPT with fingerprint" in text
    assert "delete the plan's fingerprint" in text


def test_another_class_of_the_same_shape_is_named():
    other = GPT()
    other.blocks[7].mlp[1] = nn.ReLU()
    assert "blocks.7.mlp.1: GELU() in the plan, ReLU() in the model\nBuild" in refusal(plan_for(GPT()), other)


def test_a_broken_or_new_tie_is_named():
    assert "not tied in the model: embed.weight = head.weight\n" in refusal(plan_for(GPT()), GPT(tied=False))
    assert "tied in the model only: embed.weight = head.weight\n" in refusal(plan_for(GPT(tied=False)), GPT())


def test_quantised_storage_is_another_model():
    other = GPT()
    other.head.weight = nn.Parameter(torch.zeros(20, 8, dtype=torch.int8), requires_grad=False)
    assert "Linear(weight: int8[20, 8]) in the model" in refusal(plan_for(GPT(tied=False)), other)


def test_a_lazy_layer_has_a_fingerprint():
    lazy = nn.Sequential(nn.LazyLinear(3))
    assert fingerprint(lazy)["modules"]["0"] == "LazyLinear(weight: not yet shaped, bias: not yet shaped)"


def test_a_module_shared_under_two_names_is_listed_once():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert set(fingerprint(model)["modules"]) == {"", "a"}


@pytest.mark.parametrize(
    "record",
    [
        {"hash": "0" * 16},
        {"hash": None, "modules": [1], "ties": "no"},
        {"hash": 3, "modules": {"a": 1}, "ties": [1, ["x"]]},
        {"modules": {"a.[0-999999999999].[0-999999999999]": "Linear()"}},
        {"modules": {"[5-2]": "Linear()"}},
    ],
)
def test_a_damaged_record_is_a_mismatch_and_nothing_worse(record):
    assert "the plan was made for another model" in refusal(Plan(rules=(), fingerprint=record), GPT())


part = st.sampled_from(["a", "b", "0", "1", "2", "3", "10", "007", "-1"])


@given(
    st.dictionaries(st.lists(part, min_size=1, max_size=4).map(".".join), st.sampled_from(["L()", "N()"]), min_size=1)
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_folding_loses_nothing(modules):
    assert _unfold({"modules": _fold(modules)}) == modules
