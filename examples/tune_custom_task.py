"""Tune a training task of your own: a task is a model, its data, its loss and its optimizer, each built from a seed.

Run: python examples/tune_custom_task.py
Or:  autoprec tune examples/tune_custom_task.py:task --trials 50
"""

import argparse
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

import autoprec

WIDTH, BATCH = 256, 256


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(32, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
    )


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy samples of a fixed function of 32 numbers; new ones at each step, so that nothing is memorised."""
    frequencies = torch.linspace(0.5, 3.0, 32)
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(BATCH, 32, generator=generator)
        y = torch.sin(x * frequencies).sum(1, keepdim=True)
        yield x, y + 0.1 * torch.randn(BATCH, 1, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


task = autoprec.Task(
    name="waves",
    build_model=build_model,
    batches=batches,
    loss=loss,
    optimizer=optimizer,
    samples_per_step=BATCH,
    data="waves v1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("-o", "--output", default="runs/waves")
    arguments = parser.parse_args()
    result = autoprec.tune(task, trials=arguments.trials, output_dir=arguments.output)
    print(result.verdict)


if __name__ == "__main__":
    main()
