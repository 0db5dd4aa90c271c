import pytest
import torch

from autoprec.tune.trials.peak import held_bytes, measure_peak, optimizer_bytes


def _stepped(make):
    layer = torch.nn.Linear(64, 64)
    optimizer = make(layer.parameters())
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda params: torch.optim.AdamW(params, lr=1e-3), 8),
        (lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9), 4),
        (lambda params: torch.optim.SGD(params, lr=1e-3), 0),
    ],
)
def test_the_state_of_each_trained_number_is_counted(make, size):
    assert optimizer_bytes(_stepped(make)) == pytest.approx(size, abs=0.01)


def test_without_an_optimizer_there_is_no_state():
    assert optimizer_bytes(None) == 0.0


def test_nobody_counts_a_processors_memory():
    assert held_bytes(torch.device("cpu")) == 0


@pytest.mark.gpu
def test_the_peak_of_a_step_is_what_it_holds_beyond_what_was_held():
    device = torch.device("cuda")
    kept = torch.zeros(1 << 20, device=device)
    held = held_bytes(device)
    before = torch.zeros(1 << 20, device=device)
    peak = measure_peak(lambda: (before + 1).sum() + kept.sum(), device, held)
    assert (peak.unit, peak.rounds) == ("bytes", 3)
    assert peak.low <= peak.value <= peak.high
    assert 8 * 2**20 <= peak.value < 9 * 2**20  # before, and the sum; not what was kept
