import gc

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.graph.dataflow import Step, TensorMap, follow, leaves, replace_tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lin(x).T
        index = h.argmax(0)
        h[0] += 1.0
        return F.dropout(h.float(), 0.5, training=True) + (index * 2).sum().item()


def steps_of(model: nn.Module, *inputs: torch.Tensor) -> list[Step]:
    steps: list[Step] = []
    follow(model, lambda m: m(*inputs), steps.append)
    return steps


def test_follow_shows_sites_and_the_calls_between_them_in_order() -> None:
    steps = steps_of(Net(), torch.randn(3, 4))
    shown = [(s.op, s.attribute, s.site.id if s.site else None) for s in steps]
    assert shown[0] == ("linear", "", "lin")
    assert ("__get__", "T", None) in shown
    assert ("argmax", "", "::argmax#0") in shown
    assert ("mul", "", None) in shown, "integer arithmetic is no site, and is seen"
    assert ("item", "", None) in shown
    assert [s.op for s in steps if s.op == "dropout"] == ["dropout"], "the run that fills caches isn't shown"


def test_follow_hides_what_the_recorder_and_the_observer_ask_themselves() -> None:
    seen: list[str] = []

    def see(step: Step) -> None:
        seen.append(step.op)
        torch.ones(3).sum()

    follow(nn.Linear(4, 4), lambda m: m(torch.zeros(2, 4)), see)
    assert seen == ["zeros", "linear"]


def test_a_write_keeps_the_value_before_it() -> None:
    (write,) = [s for s in steps_of(Net(), torch.randn(3, 4)) if s.name == "__iadd__" or s.name == "add_"]
    assert write.writes
    assert write.before is not None
    torch.testing.assert_close(write.args[0], write.before + 1.0)


def test_a_random_call_can_be_made_again_with_the_same_draws() -> None:
    (drop,) = [s for s in steps_of(Net(), torch.randn(3, 4)) if s.op == "dropout"]
    state = torch.get_rng_state()
    assert torch.equal(drop.again(drop.args, drop.kwargs), drop.out)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_explicit_cast_of_an_fp32_tensor_gives_a_tensor_of_its_own() -> None:
    (cast,) = [s for s in steps_of(Net(), torch.randn(3, 4)) if s.op == "float"]
    assert cast.out is not cast.args[0]
    assert cast.out.data_ptr() == cast.args[0].data_ptr()


def test_a_cast_knows_how_its_arguments_are_written() -> None:
    class Casts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = x.dtype
            return (
                x.to(torch.float32)
                .tanh()
                .to(
                    before,
                    copy=False,
                )
            )

    casts = [s for s in steps_of(Casts(), torch.randn(2)) if s.op == "to"]
    assert casts[0].written == "torch.float32)"
    assert casts[1].written.split() == ["before,", "copy=False,", ")"]


def test_a_tensor_map_tells_by_identity_and_forgets_the_dead() -> None:
    known: TensorMap[str] = TensorMap()
    a, b = torch.zeros(2), torch.zeros(2)
    known[a] = "a"
    assert (known.get(a), known.get(b)) == ("a", None)
    known[a] = "again"
    assert (known.get(a), len(known)) == ("again", 1)
    del a
    gc.collect()
    assert len(known) == 0


def test_structures_are_walked_through_slices() -> None:
    x = torch.zeros(1)
    top = (x, [x, {"k": slice(x, None)}])
    assert sum(leaf is x for leaf in leaves(top)) == 3
    y = torch.ones(1)
    replaced = replace_tensors(top, lambda _: y)
    assert sum(leaf is y for leaf in leaves(replaced)) == 3
    assert isinstance(replaced[1][1]["k"], slice)


def test_follow_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    follow(model, lambda m: m(torch.randn(8, 4)), lambda step: None)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[0]) is nn.Linear
