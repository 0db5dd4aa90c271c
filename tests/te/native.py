"""A stand-in for Transformer Engine's native library, and for the GPU it asks for.

All Python classes are the real ones; only ``transformer_engine_torch``, the compiled module below them, is written
here, with the few kernels that a per-tensor linear layer calls, in the arithmetic of autoprec.formats.  It shows which
operands, Parameters and scales reach a kernel, and in which order.  It shows nothing about the real kernels.
"""

import contextlib
import enum
import functools
import importlib
import importlib.util
import os
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoprec.formats import FORMATS, scales


class DType(enum.IntEnum):
    """As in transformer_engine.h."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
FORMAT = {DType.kFloat8E4M3: FORMATS["fp8_e4m3"], DType.kFloat8E5M2: FORMATS["fp8_e5m2"]}
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors", [f"GEMM{n}_{t}" for n in (1, 2, 3) for t in ("INPUT", "WEIGHT", "OUTPUT")], start=0
)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", [f"GRAD_{t}{n}" for n in (1, 2, 3) for t in ("OUTPUT", "INPUT")], start=0)
#: Kernels called since it was last cleared: name and what a test may want to know.
CALLS: list[tuple[str, Any]] = []


class Missing:
    """Anything else of the native library: can be named, as imports do, but not called.

    As an enum, it has the members it was asked for.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.name = name
        self.__members__: dict[str, Missing] = {}

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__members__.setdefault(name, Missing(f"{self.name}.{name}".lstrip(".")))

    def __int__(self) -> int:  # of an enum that no linear layer reads
        return zlib.crc32(self.name.encode())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"transformer_engine_torch.{self.name}: no native library here")


def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """FP8 codes of ``x`` by the quantizer's scale, or by that of its own amax."""
    assert output is None
    assert noop is None
    amax = x.detach().abs().amax().float()
    fmt = FORMAT[DType(int(quantizer.dtype))]
    if type(quantizer).__name__ == "Float8Quantizer":  # of delayed scaling
        scale = quantizer.scale.clone()
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
    else:
        scale = scales.current_scale(
            amax, fmt.max, epsilon=quantizer.amax_epsilon, power_of_two=quantizer.force_pow_2_scales
        )
    CALLS.append(("quantize", (fmt.name, scale.item())))
    codes = (x.detach().float() * scale).clamp(-fmt.max, fmt.max).to(fmt.torch_dtype).view(torch.uint8)
    arguments = {
        "data": codes.as_subclass(torch.Tensor),
        "fp8_scale_inv": scales.reciprocal(scale).reshape(1),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "data_transpose": codes.t().contiguous() if quantizer.columnwise_usage else None,
    }
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    # Whether the quantizer asks for it or not: the other kind of tensor has to be on a GPU.
    return Float8TensorStorage(**arguments, fake_dtype=x.dtype)


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return grad.sum(0), quantize(grad, quantizer)


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """In fp32: the norm, the mean (of a layer norm) and the reciprocal of the deviation."""
    rows = x.detach().float()
    mean = rows.mean(1) if bias is not None else torch.zeros(len(rows))
    inverse = (rows - mean[:, None]).square().mean(1).add(eps).rsqrt()
    out = (rows - mean[:, None]) * inverse[:, None] * weight.detach().float()
    return (out if bias is None else out + bias.detach().float()), mean, inverse


def _norm_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, quantizer: Any, dtype: Any) -> Any:
    normed, mean, inverse = _normed(x, weight, bias, eps)
    CALLS.append(("norm", {"eps": eps, "shape": tuple(x.shape), "dtype": x.dtype}))
    out = normed.to(TORCH[DType(int(dtype))])
    return (out if quantizer is None else quantize(out, quantizer)), mean, inverse


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero: bool
) -> Any:
    assert out is None
    assert not zero
    return _norm_fwd(x, weight, bias, eps, quantizer, dtype)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero: bool
) -> Any:
    assert out is None
    assert not zero
    return _norm_fwd(x, weight, None, eps, quantizer, dtype)


def _norm_bwd(grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, centred: bool) -> list[Tensor]:
    grad, rows = grad.detach().float(), x.detach().float()
    normal = (rows - mean[:, None]) * inverse[:, None]
    scaled = grad * weight.detach().float()
    inner = scaled - normal * (scaled * normal).mean(1, keepdim=True)
    if centred:
        inner = inner - scaled.mean(1, keepdim=True)
    grads = [inner * inverse[:, None], (grad * normal).sum(0), grad.sum(0)]
    return [on_gpu(g.to(x.dtype)) for g in grads]


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero: bool
) -> list[Tensor]:
    return _norm_bwd(grad, x, mean, inverse, weight, centred=True)


def rmsnorm_bwd(grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero: bool) -> list[Tensor]:
    return _norm_bwd(grad, x, torch.zeros(len(x)), inverse, weight, centred=False)[:2]


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


def _activation(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The kernel of an activation and that of its gradient, under their names."""

    def forward(x: Tensor, quantizer: Any) -> Any:
        CALLS.append(("activation", name))
        out = _FUNCTIONS[name](x.detach().float()).to(x.dtype)
        return on_gpu(out) if quantizer is None else quantize(out, quantizer)

    def backward(grad: Tensor, x: Tensor, quantizer: Any) -> Tensor:
        assert quantizer is None
        with torch.enable_grad():
            leaf = x.detach().float().as_subclass(Tensor).requires_grad_()
            (found,) = torch.autograd.grad(_FUNCTIONS[name](leaf), leaf, grad.detach().float().as_subclass(Tensor))
        return on_gpu(found.to(x.dtype))

    forward.__name__, backward.__name__ = name, f"d{name}"
    return forward, backward


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    return data.t().contiguous()


def get_cublasLt_version() -> int:
    return 130_000


def numbers(operand: Any) -> tuple[Tensor, Tensor]:
    """Values in fp32, and what they are multiplied by."""
    if isinstance(operand, Tensor) and not hasattr(operand, "_fp8_dtype"):
        return operand.float(), torch.ones(())
    codes = operand._data if operand._data is not None else operand._transpose.t()
    dtype = FORMAT[DType(int(operand._fp8_dtype))].torch_dtype
    assert dtype is not None
    return codes.contiguous().view(dtype).float(), operand._scale_inv[0]


def generic_gemm(
    a: Any, trans_a: bool, b: Any, trans_b: bool, out: Any, quantizer: Any, dtype: Any, bias: Any, *rest: Any, **_: Any
) -> tuple[Any, ...]:
    """``op(b) @ op(a)``, as cuBLAS's columns are rows."""
    assert out is None
    assert quantizer is None
    _, gelu, _, grad, _, _, accumulate, split = rest
    assert not gelu
    assert not accumulate
    (left, left_inv), (right, right_inv) = numbers(b), numbers(a)
    left, right = (left.t() if trans_b else left), (right.t() if trans_a else right)
    CALLS.append(("gemm", {"split": split, "shape": (*left.shape, right.shape[1])}))
    product = left @ right * left_inv * right_inv
    if bias is not None and not grad:
        product = product + bias.float()
    grad_bias = left.sum(1) if grad and bias is not None else None
    return on_gpu(product.to(TORCH[DType(int(dtype))])), grad_bias, None, None


def fused_amax_and_scale_update_after_reduction(
    amax: Tensor, histories: list[Tensor], all_scales: list[Tensor], algorithm: str, dtype: Any, margin: int
) -> None:
    CALLS.append(("update", (algorithm, margin)))
    for history, scale in zip(histories, all_scales, strict=True):
        new = scales.delayed_scale(history, scale, FORMAT[DType(int(dtype))].max, margin=margin, algorithm=algorithm)
        history.copy_(new[0])
        scale.copy_(new[1])


class _OnCpu(TorchFunctionMode):
    """Tensors made on the GPU are made on the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class OnGpu(Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def region() -> tuple[int, bool]:
    """How many regions are open, and whether the innermost one quantises."""
    manager: Any = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    state = getattr(manager, "quantization_state", None)
    return (manager.AUTOCAST_DEPTH if state is None else state.autocast_depth), manager.is_fp8_enabled()


def remembered() -> list[Any]:
    """What the process remembers: the recipes of past regions, and the amaxes to be reduced at the end of one."""
    manager: Any = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    state = getattr(manager, "quantization_state", manager)
    return [state.autocast_arguments, state.global_amax_buffer]


def on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


def install() -> None:
    """Puts the stand-in under the name of the native library, and keeps the package from loading another."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    module = types.ModuleType("transformer_engine_torch")
    module.__spec__ = importlib.util.spec_from_loader("transformer_engine_torch", None)
    kernels = (quantize, bgrad_quantize, fp8_transpose, generic_gemm, fused_amax_and_scale_update_after_reduction)
    norms = (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd)
    activations = [kernel for name in _FUNCTIONS for kernel in _activation(name)]
    for item in (DType, *kernels, *norms, *activations, get_cublasLt_version):
        setattr(module, item.__name__, item)
    module.FP8FwdTensors, module.FP8BwdTensors = FP8FwdTensors, FP8BwdTensors  # type: ignore[attr-defined]
    module.__getattr__ = Missing("").__getattr__  # type: ignore[method-assign]
    sys.modules["transformer_engine_torch"] = module
    sys.meta_path.insert(0, _Common())


class _Common:
    """Lets transformer_engine.common run, then takes out its search for the native library."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "transformer_engine.common":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            module.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _forget_gpu() -> None:
    """Transformer Engine remembers what the first GPU that it saw can do; versions do so in different ways."""
    for module in ("utils", "quantization"):
        imported: Any = importlib.import_module(f"transformer_engine.pytorch.{module}")
        for name, value in list(vars(imported).items()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
            elif name.endswith("_SUPPORT"):
                setattr(imported, name, None)


@contextlib.contextmanager
def gpu(capability: tuple[int, int] = (9, 0), cuda: str = "13.0") -> Iterator[None]:
    """As if there were one GPU."""
    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, gcnArchName="", name="stand-in"
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *a, **k: True,
        "device": lambda device: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
        _forget_gpu()
        stack.callback(_forget_gpu)
        stack.enter_context(mock.patch("torch.version.cuda", cuda))
        stack.enter_context(mock.patch("torch.Tensor.cuda", lambda x: x))
        stack.enter_context(mock.patch("torch.cuda.nvtx.range_push"))
        stack.enter_context(mock.patch("torch.cuda.nvtx.range_pop"))
        stack.enter_context(_OnCpu())
        yield
