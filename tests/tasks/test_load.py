import pytest
import torch

from autoprec.errors import MissingExtraError, TaskError
from autoprec.tasks import BUILTIN_TASKS, Task, load_task

GOOD = """
import torch
from autoprec.tasks import Task
import neighbour

def make():
    return Task(
        name="mine",
        build_model=lambda seed: torch.nn.Linear(4, 1),
        batches=lambda seed: [torch.ones(2, 4)],
        loss=lambda model, batch: model(batch).pow(2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )

task = make()
number = 3

def wants(seed):
    return make()

def gives_dict():
    return {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "broken.py").write_text("import torch\nraise RuntimeError('no licence')\n")
    (tmp_path / "needs.py").write_text("import not_a_package_of_anyones\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["task", "make"])
@pytest.mark.parametrize("place", ["good.py", "good"])
def test_a_task_or_a_function_that_makes_one_loads_from_file_and_module(folder, place, name):
    assert load_task(f"{place}:{name}").name == "mine"


def test_a_full_path_loads(folder):
    assert load_task(f"{folder / 'good.py'}:task").name == "mine"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet", "no task 'resnet'; allowed: a built-in task (cnn, gpt, lstm), 'file.py:name'"),
        ("good.py", "'file.py:name'"),
        (":task", "no task ':task'"),
        ("missing.py:task", "there is no file 'missing.py'"),
        ("missing.mod:task", "there is no module 'missing'"),
        ("good.py:other", "has no name 'other'; tasks there: task"),
        ("neighbour.py:task", "no Task is defined there"),
        ("good.py:number", "is a int; wanted an autoprec.tasks.Task"),
        ("good.py:Task", "is the class Task; wanted"),
        ("good.py:wants", "is a function that needs seed"),
        ("good.py:gives_dict", "returned a dict; wanted"),
        ("broken.py:task", "importing 'broken.py' raised RuntimeError: no licence"),
        ("broken:task", "importing 'broken' raised RuntimeError: no licence"),
        ("needs:task", "importing 'needs' raised ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, spec, says):
    with pytest.raises(TaskError) as caught:
        load_task(spec)
    assert says in str(caught.value)


def test_none_is_the_default_and_a_task_is_itself():
    task = load_task(None)
    assert task.name == "gpt"
    assert load_task(task) is task


@pytest.mark.parametrize("name", sorted(BUILTIN_TASKS))
def test_a_builtin_task_repeats_itself_and_learns(name):
    try:
        task = load_task(name)
    except MissingExtraError as exc:
        pytest.skip(str(exc))
    first, again = (_train(task, steps=7) for _ in range(2))
    assert first == again
    assert first[-1] < 0.95 * first[0]
    assert _train(task, steps=1, data_seed=1) != first[:1]


def _train(task: Task, steps: int, data_seed: int = 0) -> list[float]:
    model = task.build_model(0)
    optimizer = task.optimizer(model.parameters())
    stream = task.stream(data_seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, next(stream))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_default_task_has_the_size_it_says():
    task = load_task("gpt")
    inputs, targets = next(task.stream(0))
    assert inputs.numel() == task.tokens_per_step == 1024
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 3.0e6 < sum(p.numel() for p in task.build_model(0).parameters()) < 3.6e6
