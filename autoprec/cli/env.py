"""``autoprec env``: versions, devices and backends, for an issue or a colleague."""

import importlib.metadata
from typing import Any

from autoprec.cli.console import Output
from autoprec.cli.options import AsJson

#: Packages whose version matters to a result, and the optional ones.
_PACKAGES = ("autoprec", "torch", "numpy", "scipy", "optuna", "safetensors")
_OPTIONAL = ("transformers", "torchao", "transformer_engine", "scikit-learn", "onnx", "optuna-dashboard")


def env(output: Output, as_json: AsJson = False) -> None:
    """Versions, this machine's device, and which backends can run here and why not."""
    facts = describe()
    if as_json:
        return output.show_json(facts)
    for title, rows in facts.items():
        width = max(len(name) for name in rows)
        output.show("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]))


def describe() -> dict[str, dict[str, Any]]:
    """Tables of the machine, the packages, the target and the backends."""
    from autoprec.backends import get_backend, list_backends
    from autoprec.measure import describe_environment
    from autoprec.target import load_target

    target = load_target("auto")
    device = "cuda" if target.kind in ("cuda", "rocm") else "cpu"
    backends = {name: _answer(*get_backend(name).available()) for name in list_backends()}
    return {
        "packages": {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)},
        "machine": describe_environment(device).to_json(),
        "target": {"name": target.name, "formats": " ".join(target.formats), "16 bit": target.low_format},
        "backends": backends,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _answer(ok: bool, reason: str) -> str:
    return f"{'yes' if ok else 'no'}: {reason}" if reason else "yes" if ok else "no"
