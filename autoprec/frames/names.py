"""One name per op: ``a @ b``, ``torch.matmul``, ``Tensor.matmul`` and ``__rmatmul__`` are all ``matmul``.

Ops are told apart by ``func.__name__``, never by the function object: Dynamo can't guard on dicts keyed by Python-level
methods, and some libraries replace functions of torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

#: Binary operators whose dunder methods reach a function mode under their own names.
_OPERATORS = {
    "matmul": "matmul", "pow": "pow", "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "div": "div",
    "floordiv": "floor_divide", "mod": "remainder",
}  # fmt: skip

_UNARY = {"__neg__": "neg", "__abs__": "abs", "__setitem__": "index_put", "__getitem__": "index"}

#: Other spellings of the same computation.
_SYNONYMS = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rsub": "sub",
    "absolute": "abs", "negative": "neg", "clip": "clamp", "concat": "cat", "concatenate": "cat",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "special_logsumexp": "logsumexp",
    "special_expit": "sigmoid", "special_exp2": "exp2", "special_expm1": "expm1", "special_log1p": "log1p",
    "rnn_tanh_cell": "rnn_tanh_cell", "inverse": "linalg_inv", "linalg_matmul": "matmul",
}  # fmt: skip


def canonical(name: str) -> str:
    """The canonical name of a function's ``__name__``; in-place spellings fold into the plain one."""
    if name in _TABLE:
        return _TABLE[name]
    if name.endswith("_") and not name.endswith("__") and len(name) > 1:
        plain = name[:-1]
        return _TABLE.get(plain, plain)
    return name


def is_inplace(name: str) -> bool:
    """Whether a spelling writes its first argument."""
    if name.startswith("__i") and name[3:-2] in _OPERATORS:
        return True
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def spellings(op: str) -> Iterator[str]:
    """Every spelling that folds to ``op``, the in-place ones included."""
    yield op
    yield f"{op}_"
    for spelling, name in _TABLE.items():
        if name == op and spelling != op:
            yield spelling
            if not spelling.startswith("__"):
                yield f"{spelling}_"


def function_name(func: Callable[..., Any]) -> str:
    """The raw spelling of a function as a function mode meets it; empty if it has none."""
    return getattr(func, "__name__", "")


def _table() -> dict[str, str]:
    table = {f"__{prefix}{name}__": op for name, op in _OPERATORS.items() for prefix in ("", "r", "i")}
    return {**table, **_UNARY, **_SYNONYMS}


_TABLE = _table()
