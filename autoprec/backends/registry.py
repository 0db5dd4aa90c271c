"""Which backends there are, and which one takes a site."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points

from torch import Tensor

from autoprec.backends.base import Answer, Backend, Gemm
from autoprec.errors import BackendError, UsageError
from autoprec.plan import Formats, Mode
from autoprec.recipes import Recipe

GROUP = "autoprec.backends"
#: Our own, by name → "module:class"; a module is imported when its backend is first asked for.
BUILTIN = {
    "transformer_engine": "autoprec.backends.transformer_engine.backend:TransformerEngineBackend",
    "native": "autoprec.backends.native:NativeBackend",
    "torchao": "autoprec.backends.torchao:TorchaoBackend",
    "emulated": "autoprec.backends.emulated:EmulatedBackend",
}

#: Backends that were asked for, by name.
_used: dict[str, Backend] = {}


def list_backends() -> tuple[str, ...]:
    """Names of all backends, ours and those of installed packages, sorted."""
    return tuple(sorted(_factories()))


def get_backend(name: str) -> Backend:
    """The backend of that name, made on first use.

    Raises:
        UsageError: no such backend, or two packages offer the name.
        BackendError: a package's backend can't be loaded.
    """
    factory = _factories().get(name)
    if factory is None:
        raise UsageError(f"unknown backend {name!r}; known: {', '.join(list_backends())}")
    _used[name] = backend = factory()
    return backend


def reset_backends() -> None:
    """Lets every backend that was used forget what it keeps per weight: a trial starts from nothing."""
    for backend in _used.values():
        backend.reset()


def forget_weights(weights: Iterable[Tensor]) -> None:
    """Lets every backend that was used drop what it keeps for these weights: a plan was taken out."""
    weights = list(weights)
    for backend in _used.values():
        backend.forget(weights)


def held_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes that backends hold of these weights for inference, beside the weights themselves."""
    weights = list(weights)
    return sum(backend.held_bytes(weights) for backend in _used.values())


def choose(
    op: str,
    formats: Formats,
    x: Tensor,
    weight: Tensor,
    names: Sequence[str],
    mode: Mode,
    *,
    recipe: Recipe | None = None,
) -> tuple[Backend | None, str]:
    """The backend for one site.

    Args:
        op: canonical op name.
        formats: format of each role.
        x: an input as the site gets it; only shape, dtype and device are read.
        weight: ``[N, K]``.
        names: backends to try in this order; empty tries all, the fastest first, emulation only where no hardware is.
        mode: ``training`` or ``inference``.
        recipe: how scaled formats get their scales.

    Returns:
        The backend, or None, and the reason: why those tried before it, or all, were left.

    Raises:
        UsageError: an unknown name.
    """
    gemm = Gemm(
        op=op,
        formats=formats,
        recipe=recipe,
        input_shape=tuple(x.shape),
        weight_shape=tuple(weight.shape),
        dtype=x.dtype,
        device=x.device,
        mode=mode,
    )
    candidates = [get_backend(name) for name in names] or by_speed()
    refusals = []
    for backend in candidates:
        ok, reason = _ask(backend, gemm, named=bool(names))
        if ok:
            return backend, "; ".join([*refusals, f"{backend.name}: {reason}"])
        refusals.append(f"not {backend.name}: {reason}")
    return None, "; ".join(refusals)


def by_speed() -> list[Backend]:
    """All backends, the fastest first."""
    return sorted((get_backend(name) for name in list_backends()), key=lambda b: (b.speed, b.name))


def _ask(backend: Backend, gemm: Gemm, *, named: bool) -> Answer:
    wanted = (True, "") if named else backend.wanted(gemm)
    if not wanted[0]:  # asked first: to say whether it is available a backend may have to import its library
        return wanted
    available = backend.available()
    return backend.supports(gemm) if available[0] else available


@functools.cache
def _factories() -> dict[str, Callable[[], Backend]]:
    factories: dict[str, Callable[[], Backend]] = {
        name: functools.cache(functools.partial(_load_builtin, path)) for name, path in BUILTIN.items()
    }
    owners = dict.fromkeys(BUILTIN, "autoprec")
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        owner = point.dist.name if point.dist else point.value
        if point.name in owners:
            raise UsageError(
                f"two packages offer a backend named {point.name!r}: {owners[point.name]} and {owner}; uninstall one"
            )
        owners[point.name] = owner
        factories[point.name] = functools.cache(functools.partial(_load_plugin, point, owner))
    return factories


def _load_builtin(path: str) -> Backend:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)()


def _load_plugin(point: EntryPoint, owner: str) -> Backend:
    try:
        backend = point.load()()
    except Exception as error:
        raise BackendError(
            f"backend {point.name!r} of package {owner} can't be loaded: {error!r}; uninstall or fix it"
        ) from error
    if not isinstance(backend, Backend):
        raise BackendError(
            f"backend {point.name!r} of package {owner} isn't an autoprec.backends.Backend, but {type(backend)}"
        )
    return backend
