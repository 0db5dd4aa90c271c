import pytest
import torch

from autoprec.tune.processes import leaks
from autoprec.tune.processes.leaks import MemoryWatch, apply_settings, changed_settings, is_broken, read_settings

CPU = torch.device("cpu")


def _flag(owner, name):
    return lambda: setattr(owner, name, not getattr(owner, name))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("the default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("the grad mode", lambda: torch.set_grad_enabled(False)),
        ("deterministic algorithms", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        ("flushing of denormals", lambda: torch.set_flush_denormal(True)),
        ("the number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("autocast on the CPU", lambda: torch.set_autocast_enabled("cpu", True)),
        ("autocast on CUDA", lambda: torch.set_autocast_dtype("cuda", torch.bfloat16)),
        ("the float32 matmul precision", lambda: torch.set_float32_matmul_precision("medium")),
        ("torch.backends.cudnn.benchmark", _flag(torch.backends.cudnn, "benchmark")),
        (
            "torch.backends.cuda.matmul.fp32_precision",
            lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        ),
    ],
)
def test_a_changed_setting_is_seen_and_can_be_put_back(name, change):
    before = read_settings()
    try:
        change()
        assert name in changed_settings(before)
    finally:
        apply_settings(before)
    assert changed_settings(before) == []


def test_what_is_active_is_seen():
    before = read_settings()
    with torch.inference_mode():
        assert "inference mode" in changed_settings(before)
    with torch.device("meta"):
        assert changed_settings(before) == ["the default device", "active torch modes"]
    assert changed_settings(before) == []


def test_memory_is_compared_with_the_first_trials(monkeypatch):
    monkeypatch.setattr(leaks, "_SLACK_BYTES", {"cpu": 50 << 20, "accelerator": 0})
    monkeypatch.setattr(leaks, "_SLACK_SHARE", 0.0)
    filled = torch.ones(1 << 26, dtype=torch.uint8)  # by the first trial, on purpose
    watch = MemoryWatch(CPU)
    assert watch.grown() == ""
    kept = torch.ones(1 << 27, dtype=torch.uint8)
    assert watch.grown().endswith("MiB of memory more than after its first trial")
    assert 100 < int(watch.grown().split()[0]) < 200
    del kept
    assert watch.grown() == ""
    assert filled.all()


def test_a_processor_does_not_break():
    assert is_broken(CPU) == ""
