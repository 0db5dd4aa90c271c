import pytest
import torch
from torch import nn

from autoprec.cli.model import load_model
from autoprec.errors import TaskError


def test_a_factory_gives_module_and_inputs_and_its_weights_follow_the_seed(models):
    first, again, other = (load_model("models.py:factory", seed) for seed in (1, 1, 2))
    assert isinstance(first.example_inputs, tuple)
    assert torch.equal(first.module.out.weight, again.module.out.weight)
    assert not torch.equal(first.module.out.weight, other.module.out.weight)


def test_a_module_comes_without_inputs(models):
    assert load_model("models.py:module").example_inputs is None
    assert isinstance(load_model("models:module").module, nn.Module)


def test_a_task_gives_its_loss_on_a_batch():
    named = load_model("cnn")
    assert named.example_inputs(named.module).ndim == 0
    assert named.mode == "training"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nope", "built-in task"),
        ("missing.py:x", "no file 'missing.py'"),
        ("models.py:missing", "no name 'missing'"),
        ("no_such_package.x:y", "no_such_package"),
        ("models.py:number", "is a int"),
        ("models.py:Gated", "is a type"),
        ("models.py:broken", "RuntimeError: no such weights"),
    ],
)
def test_what_is_no_model_is_an_error_that_names_it(models, spec, said):
    with pytest.raises(TaskError, match=spec.split(":")[0]) as caught:
        load_model(spec)
    assert said in str(caught.value)


def test_a_task_with_trained_weights_gives_a_model_that_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = nn.Linear(3, 1)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    (tmp_path / "mine.py").write_text(
        "import torch, autoprec\n"
        "task = autoprec.Task(name='mine', build_model=lambda seed: torch.nn.Linear(3, 1), mode='inference',\n"
        "    batches=lambda seed: [torch.ones(2, 3)], loss=lambda model, x: model(x).mean(), checkpoint='trained.pt')\n"
    )
    assert torch.equal(load_model("mine.py:task").module.weight, trained.weight)
