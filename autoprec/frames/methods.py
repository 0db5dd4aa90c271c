"""Which methods of a class, beside ``forward``, compute: those get a frame of their own.

Then ``model.encode(x)`` runs in the plan when it is called directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

#: Modules whose methods are machinery around the computation, not the computation.
_MACHINERY = ("torch.", "transformers.modeling_utils", "transformers.generation", "lightning.", "pytorch_lightning.")


def computing_methods(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """Plain methods of ``cls`` that its forward reaches by ``self.name`` or that name a submodule-like attribute.

    Returns:
        method name → the function as ``cls`` resolves it, ``forward`` not among them.
    """
    own = {name: func for name, func in _plain_methods(cls) if name != "forward"}
    reached: dict[str, FunctionType] = {}
    todo = [_body(cls.forward)]
    while todo:
        for name in _names(todo.pop()):
            if name in own and name not in reached:
                reached[name] = own[name]
                todo.append(_body(own[name]))
    used = _names(_body(cls.forward)).union(*(_names(_body(f)) for f in reached.values()))
    attributes = used - set(own) - _module_attributes()
    for name, func in own.items():
        # A sibling of forward: `encode` that shares layers with forward but isn't called by it.
        if name not in reached and not name.startswith("_") and _names(_body(func)) & attributes & _assigned(cls):
            reached[name] = func
    return reached


def _plain_methods(cls: type) -> Iterator[tuple[str, FunctionType]]:
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module or base is object:
            continue
        machinery = base.__module__.startswith(_MACHINERY)
        for name, value in vars(base).items():
            if name in seen or (name.startswith("__") and name.endswith("__")):
                continue
            seen.add(name)
            if isinstance(value, FunctionType) and not machinery:
                yield name, value


def _assigned(cls: type) -> set[str]:
    """Names that an ``__init__`` of the class stores on ``self``: parameters, buffers and submodules among them."""
    return set().union(
        *(
            _names(vars(b)["__init__"])
            for b in cls.__mro__
            if isinstance(vars(b).get("__init__"), FunctionType) and b is not nn.Module
        )
    )


def _module_attributes() -> set[str]:
    return set(dir(nn.Module)) | {"config", "training"}


def _body(func: Callable[..., Any]) -> Callable[..., Any]:
    """The undecorated function: the names that matter are in its code, not in the decorator's."""
    return inspect.unwrap(func)


def _names(func: Any) -> set[str]:
    code = getattr(func, "__code__", None)
    return set() if code is None else set(code_names(code))


def code_names(code: CodeType) -> Iterator[str]:
    """Global and attribute names in a function's code, nested functions included."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from code_names(const)
