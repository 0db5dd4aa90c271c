"""A CNN on scikit-learn's handwritten digits: real images that a dependency ships."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.errors import MissingExtraError
from autoprec.tasks.task import Batch, Task

# Shapes: N images, C channels, H and W 8 pixels each.


@lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor]:
    """``(image_NCHW, label_N)``: 1,797 grey 8 x 8 images in 0 … 1, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as exc:
        raise MissingExtraError(
            "the built-in task 'cnn' trains on scikit-learn's digits, and scikit-learn isn't installed; "
            "pip install 'autoprec[digits]', or take the task 'gpt' or 'lstm', which need nothing"
        ) from exc
    pixels_ND, label_N = load_digits(return_X_y=True)
    images_NCHW = torch.as_tensor(pixels_ND, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images_NCHW, torch.as_tensor(label_N, dtype=torch.long)


def noisy_batches(seed: int, *, batch: int, noise: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Images drawn at random with fresh noise on each, so that a study's checkpoint isn't a memorised one."""
    images_NCHW, label_N = digits()
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(label_N), (batch,), generator=generator)
        picked = images_NCHW[chosen]
        yield picked + noise * torch.randn(picked.shape, generator=generator), label_N[chosen]


class DigitsCNN(nn.Module):
    """Three convolutions with batch norm, then two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.hidden = nn.Linear(4 * width * 4, 4 * width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, 10)`` of images ``(N, 1, 8, 8)``."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = F.max_pool2d(F.relu(self.norm3(self.conv3(x))), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def digit_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the digit, in nats."""
    images_NCHW, label_N = batch
    return F.cross_entropy(model(images_NCHW), label_N)


def make_task(*, width: int = 32, batch: int = 128, noise: float = 0.5) -> Task:
    """The CNN task; the defaults give 160 thousand parameters.

    Raises:
        MissingExtraError: scikit-learn isn't installed.
    """
    digits()

    def build_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return DigitsCNN(width)

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    return Task(
        name="cnn",
        build_model=build_model,
        batches=lambda seed: noisy_batches(seed, batch=batch, noise=noise),
        loss=digit_loss,
        optimizer=optimizer,
        samples_per_step=batch,
        data=f"sklearn-digits noise={noise} {batch}",
    )
