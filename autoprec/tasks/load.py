"""Find a task by name: a built-in one, ``file.py:name`` or ``pkg.mod:name``."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from autoprec.errors import TaskError
from autoprec.tasks.task import Task

#: Built-in task → the module that makes it (by a function ``make_task``); imported only when asked for.
BUILTIN_TASKS: dict[str, str] = {
    "cnn": "autoprec.tasks.digits_cnn",
    "gpt": "autoprec.tasks.byte_gpt",
    "lstm": "autoprec.tasks.byte_lstm",
}
DEFAULT_TASK = "gpt"
_SPELLINGS = f"a built-in task ({', '.join(BUILTIN_TASKS)}), 'file.py:name' or 'pkg.mod:name'"


def load_task(spec: str | Task | None = None) -> Task:
    """The task that ``spec`` names.

    Args:
        spec: a built-in name, ``file.py:name``, ``pkg.mod:name`` (a Task, or a function without arguments that
            returns one), a Task, or None for the default.

    Raises:
        TaskError: the file, module or name is missing, importing it failed, or it isn't a task.
    """
    if isinstance(spec, Task):
        return spec
    spec = DEFAULT_TASK if spec is None else str(spec)
    if spec in BUILTIN_TASKS:
        make: Callable[[], Task] = importlib.import_module(BUILTIN_TASKS[spec]).make_task
        return make()
    return _as_task(find_object(spec), spec)


def find_object(spec: str) -> object:
    """What ``file.py:name`` or ``pkg.mod:name`` names, whatever it is.

    Raises:
        TaskError: the file, module or name is missing, or importing it failed.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise TaskError(f"no task {spec!r}; allowed: {_SPELLINGS}")
    module = _load_file(place, spec) if place.endswith(".py") else _load_module(place, spec)
    return _find(module, name, place)


def _load_file(place: str, spec: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise TaskError(f"task {spec!r}: there is no file {place!r} (looked for {path})")
    # Registered under its stem, so that what the file defines can be pickled and told apart from the package's own.
    module_spec = importlib.util.spec_from_file_location(f"autoprec_task_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise TaskError(f"task {spec!r}: Python can't import {place!r}")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        with _importable(path.parent):
            module_spec.loader.exec_module(module)
    except Exception as exc:
        del sys.modules[module_spec.name]
        raise TaskError(f"task {spec!r}: importing {place!r} raised {type(exc).__name__}: {exc}") from exc
    return module


def _load_module(place: str, spec: str) -> ModuleType:
    try:
        with _importable(Path.cwd()):
            return importlib.import_module(place)
    except ModuleNotFoundError as exc:
        if exc.name and (place == exc.name or place.startswith(f"{exc.name}.")):
            raise TaskError(
                f"task {spec!r}: there is no module {exc.name!r}; installed packages and modules in the current folder "
                "can be named, a file as 'file.py:name'"
            ) from exc
        raise TaskError(f"task {spec!r}: importing {place!r} raised {type(exc).__name__}: {exc}") from exc
    except Exception as exc:
        raise TaskError(f"task {spec!r}: importing {place!r} raised {type(exc).__name__}: {exc}") from exc


@contextmanager
def _importable(folder: Path):
    """A console script doesn't have the folder it is called from on ``sys.path``; a task's neighbours must import."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _find(module: ModuleType, name: str, place: str) -> object:
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            tasks = sorted(key for key, value in vars(module).items() if isinstance(value, Task))
            has = f"tasks there: {', '.join(tasks)}" if tasks else "no Task is defined there"
            raise TaskError(f"{place!r} has no name {name!r}; {has}")
        found = getattr(found, part)
    return found


def _as_task(found: object, spec: str) -> Task:
    if isinstance(found, Task):
        return found
    wanted = "wanted an autoprec.tasks.Task, or a function without arguments that returns one"
    if isinstance(found, type) or not callable(found):
        shown = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise TaskError(f"task {spec!r} is {shown}; {wanted}")
    required = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise TaskError(f"task {spec!r} is a function that needs {', '.join(required)}; {wanted}")
    made = found()
    if not isinstance(made, Task):
        raise TaskError(f"task {spec!r} returned a {type(made).__name__}; {wanted}")
    return made
