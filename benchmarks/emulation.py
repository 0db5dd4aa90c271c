"""How far ``emulated`` is from an H100's FP8 tensor cores: operand codes, and the error of accumulation.

    pip install mmaemu
    python benchmarks/emulation.py

``mmaemu`` replays ``torch._scaled_mm`` of an H100 PCIe bit for bit on a CPU (without split-K).  Operand codes must be
equal; what is left is how the hardware accumulates, which is compared with the error that FP8 itself makes.

Writes ``benchmarks/results/emulation.json``.
"""

from __future__ import annotations

import json
import warnings
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoprec.backends import LinearSpec, get_backend
from autoprec.formats import FORMATS, scales
from autoprec.measure import describe_environment
from autoprec.plan import Formats
from autoprec.recipes import CurrentRecipe

RESULT = Path(__file__).parent / "results" / "emulation.json"
SHAPES = [(64, 64, 256), (64, 64, 1024), (64, 64, 4096), (256, 128, 1024)]
INPUT_SCALES = [1.0, 1e-3]
SPEC = LinearSpec(
    formats=Formats(input="fp8_e4m3", weight="fp8_e4m3", grad_output="fp8_e5m2"),
    recipe=CurrentRecipe(),
    output_dtype=torch.float32,
)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes by torch's own cast, and the inverse scale."""
    scale = scales.current_scale(x.abs().amax(), FORMATS["fp8_e4m3"].max)
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scales.reciprocal(scale)


def compare(mmaemu: Any, shape: tuple[int, int, int], input_scale: float, fast: bool) -> dict[str, Any]:
    """One forward product of ``[rows, in_features]`` and ``[out_features, in_features]``."""
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator) * input_scale
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    emulated = get_backend("emulated").linear(x, weight, None, SPEC)
    (a, a_scale), (b, b_scale) = encode(x), encode(weight)
    codes_product = (a.double() @ b.double().T) * a_scale.double() * b_scale.double()
    hardware = mmaemu.scaled_mm(
        a, b.t(), a_scale, b_scale, out_dtype=torch.float32, use_fast_accum=fast, splitk=1
    ).double()
    exact = x.double() @ weight.double().T
    magnitude = (a.double().abs() @ b.double().abs().T) * a_scale.double() * b_scale.double()
    return {
        "rows": rows,
        "out_features": outputs,
        "in_features": inputs,
        "input_scale": input_scale,
        "fast_accumulation": fast,
        # Zero but for fp32 rounding if and only if emulation multiplies the codes that the kernel is given.
        "emulated_from_codes": relative(emulated.double(), codes_product),
        "hardware_from_codes": relative(hardware, codes_product),
        "hardware_from_emulated": relative(hardware, emulated.double()),
        "largest_error_over_sum_of_magnitudes": ((hardware - codes_product).abs() / magnitude).max().item(),
        "fp8_error": relative(emulated.double(), exact),
    }


def relative(x: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return ((x - reference).norm() / reference.norm()).item()


def main() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import mmaemu
    except ImportError as error:
        raise SystemExit("this benchmark replays an H100 with mmaemu; pip install mmaemu") from error
    rows = [compare(mmaemu, *case) for case in product(SHAPES, INPUT_SCALES, (False, True))]
    environment = {**describe_environment("cpu").to_json(), "mmaemu": version("mmaemu"), "replays": "H100 PCIe"}
    RESULT.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print("distance from the exact product of the codes, and of that product from the fp32 one")
    print(f"{'shape':>16} {'scale':>6} {'fast':>5} {'emulated':>9} {'hardware':>9} {'fp8':>7}")
    for row in rows:
        shape = "x".join(str(row[k]) for k in ("rows", "out_features", "in_features"))
        print(
            f"{shape:>16} {row['input_scale']:>6} {row['fast_accumulation']!s:>5} {row['emulated_from_codes']:>9.1e} "
            f"{row['hardware_from_codes']:>9.1e} {row['fp8_error']:>7.1%}"
        )


if __name__ == "__main__":
    main()
