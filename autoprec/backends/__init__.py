"""Kernels that compute a linear layer in low precision, behind one small base."""

from autoprec.backends.base import Backend, Gemm, LinearSpec
from autoprec.backends.registry import choose, get_backend, list_backends

__all__ = ["Backend", "Gemm", "LinearSpec", "choose", "get_backend", "list_backends"]
