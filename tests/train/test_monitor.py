"""A run that can't train is stopped, and says where the first value comes from that isn't finite."""

import pytest
import torch
from torch import nn

from autoprec.errors import NonFiniteError, TrainingError, UsageError
from autoprec.plan import ScalerSettings
from autoprec.scaler import BoundedGradScaler
from autoprec.train import Stepper, TrainingMonitor


class Bad(nn.Module):
    """The derivative of sqrt at 0 is infinite, at any scale."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) * 0).sqrt().sum()


def run(model: nn.Module, iterations: int, scaler: torch.amp.GradScaler | None) -> Stepper:
    torch.manual_seed(0)
    with Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler) as step:
        for _ in range(iterations):
            step(model(torch.ones(1, 2)))
    return step


@pytest.mark.parametrize(
    ("scaler", "last", "scale"),
    [
        (None, 2, "1"),
        (lambda: BoundedGradScaler(ScalerSettings(enabled=True), device="cpu"), 18, "1"),
        (lambda: torch.amp.GradScaler("cpu"), 18, "0.25"),
    ],
    ids=["no scaler", "ours", "torch's"],
)
def test_a_persistent_nan_stops_the_run_and_names_op_and_parameter(scaler, last, scale):
    model = Bad()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError) as caught:
        run(model, 200, scaler and scaler())
    text = str(caught.value)
    assert f"(iterations 0 to {last})" in text
    assert f"the loss scale is {scale}, so low that overflow by the scale isn't the cause. First: Sqrt" in text
    assert "First: SqrtBackward0 of the model's own forward gives a gradient that isn't finite" in text
    assert "the first parameter it reached is 'lin." in text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not model._forward_hooks
    assert not model.lin._forward_pre_hooks


def test_a_compiled_model_is_stopped_without_breaking_its_graph():
    model = torch.compile(Bad(), backend="aot_eager", fullgraph=True)
    with pytest.raises(NonFiniteError, match=r"First: CompiledFunctionBackward .* first parameter .*lin\."):
        run(model, 10, None)


def test_a_slow_backoff_is_stopped_by_patience():
    scaler = BoundedGradScaler(ScalerSettings(enabled=True, backoff_factor=0.99), device="cpu")
    with pytest.raises(NonFiniteError, match=r"the last 25 optimizer steps .* loss scale is 51490\.2\. First: Sqrt"):
        run(Bad(), 200, scaler)


def test_a_short_run_without_one_step_is_not_called_done():
    scaler = BoundedGradScaler(ScalerSettings(enabled=True), device="cpu")
    with pytest.raises(NonFiniteError, match=r"all 5 optimizer steps were skipped, .* from 65536 to 4096: nothing"):
        run(Bad(), 5, scaler)


def test_an_error_of_the_loop_is_not_replaced():
    model = Bad()
    step = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model(torch.ones(1, 2)))
    with pytest.raises(KeyError), step:
        raise KeyError("loop")


class Sometimes(nn.Module):
    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.lin, self.bad, self.calls = nn.Linear(2, 1), bad, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.lin(x).sum() * (float("inf") if self.calls in self.bad else 1.0)


def test_a_few_bad_batches_are_skipped_and_counted():
    scaler = BoundedGradScaler(ScalerSettings(enabled=True, init_scale=8.0, growth_interval=3), device="cpu")
    step = run(Sometimes({2, 3, 9}), 12, scaler)
    monitor = step.monitor
    assert (monitor.steps, monitor.skipped, monitor.skipped_in_a_row, monitor.iterations) == (9, 3, 0, 12)
    assert monitor.scales == [(0, 8.0), (3, 4.0), (4, 2.0), (7, 4.0), (10, 2.0)]


def test_the_probe_leaves_when_training_recovers():
    model = Sometimes({4, 5})
    step = run(model, 8, None)
    assert (step.monitor.steps, step.monitor.skipped) == (6, 2)
    assert not model._forward_hooks


def test_patience_below_two_is_refused():
    with pytest.raises(UsageError, match="patience=1"):
        TrainingMonitor(patience=1)


def test_a_damaged_state_is_refused():
    with pytest.raises(TrainingError, match="lacks scales"):
        TrainingMonitor().load_state_dict({k: v for k, v in TrainingMonitor().state_dict().items() if k != "scales"})
