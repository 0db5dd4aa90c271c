"""Merged casts: fewer of them, every bit of the result."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autoprec.lower.fast.merge import keep_weight_casts, merge_casts

LOW = torch.bfloat16


def traced(function, *inputs):
    """The graph with example values, as Dynamo gives them."""
    graph = fx.symbolic_trace(function)
    values = {}

    class Fill(fx.Interpreter):
        def run_node(self, n):
            n.meta["example_value"] = values[n] = super().run_node(n)
            return values[n]

    Fill(graph).run(*inputs)
    return graph


def casts(graph):
    return sum(node.op == "call_method" and node.target == "to" for node in graph.graph.nodes)


def shared(x, w):
    return F.linear(x.to(LOW), w.to(LOW)) + F.linear(x.to(LOW), w.to(LOW))


def up_and_down(x, w):
    h = F.linear(x.to(LOW), w.to(LOW)).to(torch.float32)
    return F.linear(h.to(LOW), w.to(LOW))


def down_and_up(x, w):
    return F.linear(x.to(LOW).to(torch.float32), w)


def written(x, w):
    h = x.to(LOW)
    h.add_(1)
    return F.linear(x.to(LOW), w.to(LOW)) + F.linear(h, w.to(LOW))


def written_by_keyword(x, w):
    h = x.to(LOW)
    h = F.relu(h, True)
    return F.linear(x.to(LOW), w.to(LOW)) + F.linear(h, w.to(LOW))


def returned(x, w):
    return x.to(LOW), x.to(LOW).view(-1), F.linear(x.to(LOW), w.to(LOW))


@pytest.mark.parametrize(
    ("function", "gone"),
    [
        (shared, 2),
        (up_and_down, 3),
        (down_and_up, 0),
        (written, 0),
        (written_by_keyword, 0),
        (returned, 1),
    ],
)
def test_merging_removes_casts_and_keeps_bits(function, gone):
    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = traced(function, x, w)
    before = casts(graph)
    expected = function(x, w)
    assert merge_casts(graph) == gone
    assert casts(graph) == before - gone
    for a, b in zip(
        torch.utils._pytree.tree_leaves(graph(x, w)), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert torch.equal(a, b)


def test_a_graph_that_writes_by_an_operator_is_left_as_it_is():
    def adds(x, w):
        h = x.to(LOW)
        return F.linear(x.to(LOW), w.to(LOW)) + F.linear(h + 1, w.to(LOW))

    graph = traced(adds, torch.randn(4, 4), torch.randn(4, 4))
    next(node for node in graph.graph.nodes if node.target is operator.add).target = operator.iadd
    assert merge_casts(graph) == 0


def test_results_that_the_caller_gets_share_no_memory():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    graph = traced(returned, x, w)
    merge_casts(graph)
    first, second, _ = graph(x, w)
    assert first.data_ptr() != second.data_ptr()


def test_kept_weight_casts_follow_a_written_weight():
    def linear(x, w):
        return F.linear(x.to(LOW), w.to(LOW))

    x, w = torch.randn(2, 4), nn.Parameter(torch.randn(4, 4))
    with torch.no_grad():
        graph = traced(linear, x, w)
        assert keep_weight_casts(graph) == 1
        assert torch.equal(graph(x, w), linear(x, w))
        w.mul_(2)
        assert torch.equal(graph(x, w), linear(x, w))
