import pytest
import torch
from safetensors.torch import save_file

from autoprec.errors import StudyError, TaskError
from autoprec.tune.trials.checkpoint import (
    CURVE,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    has_settled,
    load_checkpoint,
    load_user_weights,
)


def _checkpoint() -> Checkpoint:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Checkpoint(
        weights=model.state_dict(),
        optimizer=optimizer.state_dict(),
        losses=(2.0, 1.0),
        origin="trained here",
        identity={"task": "t"},
    )


def test_a_saved_checkpoint_loads_to_the_last_bit(tmp_path):
    saved = _checkpoint()
    saved.save(tmp_path / "new")
    loaded = load_checkpoint(tmp_path / "new")
    assert all(torch.equal(loaded.weights[name], value) for name, value in saved.weights.items())
    state, other = loaded.optimizer["state"][0], saved.optimizer["state"][0]
    assert all(torch.equal(state[key], other[key]) for key in other)
    assert (loaded.losses, loaded.origin, loaded.identity) == (saved.losses, saved.origin, saved.identity)


def test_tied_weights_are_saved(tmp_path):
    shared = torch.ones(2, 2)
    Checkpoint(weights={"a": shared, "b": shared.t()}, origin="").save(tmp_path)
    assert set(load_checkpoint(tmp_path).weights) == {"a", "b"}


def test_without_the_last_file_there_is_none(tmp_path):
    _checkpoint().save(tmp_path)
    (tmp_path / CURVE).unlink()
    assert load_checkpoint(tmp_path) is None


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, CURVE])
@pytest.mark.parametrize("content", [b"", b"garbage", b"{}"])
def test_a_damaged_file_is_one_clear_error(tmp_path, name, content):
    _checkpoint().save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StudyError, match="can't be read"):
        load_checkpoint(tmp_path)


def test_an_optimizer_state_with_code_is_not_run(tmp_path):
    _checkpoint().save(tmp_path)
    torch.save({"state": _Evil(str(tmp_path / "ran"))}, tmp_path / OPTIMIZER)
    with pytest.raises(StudyError):
        load_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_the_users_weights_load_from_both_kinds_of_file(tmp_path):
    weights = {"weight": torch.ones(2, 3)}
    save_file(weights, tmp_path / "a.safetensors")
    torch.save(weights, tmp_path / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        loaded = load_user_weights(tmp_path / name, "t")
        assert torch.equal(loaded.weights["weight"], weights["weight"])
        assert name in loaded.origin


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: None, "there is no checkpoint"),
        (lambda path: path.write_bytes(b"no"), "can't be read as a state dict"),
        (lambda path: torch.save([1, 2], path), "isn't a state dict of tensors"),
        (lambda path: torch.save(_Evil(str(path) + ".ran"), path), "can't be read as a state dict"),
    ],
)
def test_other_files_are_refused(tmp_path, write, says):
    path = tmp_path / "w.pt"
    write(path)
    with pytest.raises(TaskError, match=says):
        load_user_weights(path, "t")
    assert not (tmp_path / "w.pt.ran").exists()


@pytest.mark.parametrize(
    ("losses", "settled"),
    [
        ([5.0 - 0.01 * k for k in range(200)], False),  # falls as fast as ever
        ([5.0 * 0.97**k for k in range(200)], True),
        ([1.0] * 200, False),  # never fell: nothing to compare with
        ([5.0 * 0.97**k for k in range(90)], False),  # too short to say
    ],
)
def test_the_warm_up_ends_when_the_loss_falls_slowly(losses, settled):
    assert has_settled(losses) is settled
