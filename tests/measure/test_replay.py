"""Calls as they are written down: what tells two apart, what a step counts, and what can't be made again."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.measure.replay import OpCall, TensorSpec, record_calls


def record_one(module: nn.Module, *inputs: torch.Tensor, mode="training") -> list[OpCall]:
    return record_calls(module, lambda m: m(*inputs), mode)


class Calls(nn.Module):
    """A module whose forward is the function it is given."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs):
        return self.function(self, *inputs)


def key(function, *inputs, mode="training", **parameters) -> str:
    (call,) = record_one(Calls(function, **parameters), *inputs, mode=mode)
    return call.key


def test_arguments_are_described_by_what_they_are_to_the_model():
    def forward(self, x, index):
        return F.embedding(index, self.table) + x @ self.weight.T

    module = Calls(forward, table=torch.randn(5, 4), weight=torch.randn(4, 3))
    calls = {
        call.site.op: call for call in record_one(module, torch.randn(2, 3).requires_grad_(), torch.tensor([0, 4]))
    }
    index, table = calls["embedding"].args[:2]
    x, weight = calls["matmul"].args
    assert (index.role, table.role, x.role, weight.role) == ("value", "parameter", "activation", "stored")
    assert torch.equal(index.tensor, torch.tensor([0, 4]))
    assert x.tensor is None
    assert (weight.shape, weight.stride, weight.requires_grad) == ((3, 4), (1, 3), True)
    assert str(x) == "activation torch.float32 [2, 3] [3, 1] learns"
    assert calls["matmul"].numel == 2 * 3 + 3 * 4


def test_calls_that_cost_the_same_have_one_key():
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU())
    calls = record_one(block, torch.randn(2, 4).requires_grad_())
    assert [call.site.op for call in calls] == ["linear", "gelu", "linear", "gelu"]
    assert calls[0].key == calls[2].key != calls[1].key == calls[3].key


def test_a_key_tells_what_changes_a_cost():
    x = torch.randn(2, 3, 8, 8)
    q = torch.randn(1, 2, 6, 4)

    def attend(**settings):
        return lambda self, q: F.scaled_dot_product_attention(q, q, q, **settings)

    def convolve(**settings):
        (call,) = record_one(nn.Conv2d(3, 3, 3, **settings), x)
        return call.key

    keys = [
        key(attend(), q),
        key(attend(is_causal=True), q),
        key(attend(is_causal=True), q.clone().requires_grad_()),
        key(attend(), torch.randn(1, 2, 4, 6).transpose(2, 3)),
        key(attend(), torch.randn(1, 2, 7, 4)),
        convolve(padding=1),
        convolve(padding=2, dilation=2),
        convolve(padding=1, groups=3),
        convolve(padding=1, padding_mode="circular"),
    ]
    assert len(set(keys)) == len(keys)
    assert key(attend(is_causal=True), q.clone().requires_grad_(), mode="inference") == key(attend(is_causal=True), q)


def test_numbers_of_activations_are_not_in_the_key():
    def total(self, x, scale=2.0):
        return F.softmax(x, dim=-1)

    assert key(total, torch.zeros(2, 3)) == key(total, torch.ones(2, 3))


def test_a_key_is_the_same_in_another_process():
    code = (
        "import torch\n"
        "from torch import nn\n"
        "from autoprec.measure.replay import record_calls\n"
        "model = nn.Sequential(nn.Conv1d(2, 3, 3, stride=2), nn.ReLU(inplace=True), nn.LSTM(7, 5))\n"
        "keys = [call.key for call in record_calls(model, lambda m: m(torch.randn(4, 2, 16)))]\n"
    )
    here: dict[str, list[str]] = {}
    exec(code, here)
    there = subprocess.run([sys.executable, "-c", f"{code}print(keys)"], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here["keys"])
    assert [key.split()[0] for key in here["keys"]] == ["conv1d", "relu", "to", "zeros", "lstm"]


def test_calls_of_a_step_are_counted_by_what_they_cost():
    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return x[:1] @ self.layer(x).T

    module = Calls(forward)
    module.layer = nn.Linear(4, 4)
    calls = record_one(module, torch.randn(5, 4))
    # the first input gets no gradient, so its call costs less
    assert [(c.site.id, c.count) for c in calls if c.site.op == "linear"] == [("layer", 1), ("layer", 3)]
    assert all(call.site.flops == 2 * 5 * 4 * 4 for call in calls if call.site.op == "linear")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda self, x: x.clone().add_(1.0), "add_ writes its argument"),
        (lambda self, x: torch.relu_(x.clone()), "relu_ writes its argument"),
        (lambda self, x: torch.mul(x, x, out=torch.empty_like(x)), "mul writes its argument"),
        (lambda self, x: torch.sin(x.double()), "float64"),
        (lambda self, x: torch.bernoulli(x, generator=torch.Generator()), "type Generator"),
        (lambda self, x: torch.sparse.mm(x.to_sparse(), x), "type Tensor"),
    ],
)
def test_what_cannot_be_made_again_says_why(function, why):
    calls = record_calls(Calls(function), lambda m: m(torch.rand(3, 3)), "inference")
    assert any(why in call.why_not for call in calls), [call.why_not for call in calls]


def test_an_activation_in_place_is_made_again_out_of_place():
    calls = record_one(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(2, 3))
    assert calls[1].why_not == ""
    assert calls[1].kwargs == {"inplace": False}
    assert isinstance(calls[1].args[0], TensorSpec)
