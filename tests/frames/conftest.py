"""Small models whose forwards are reached in every way, and a way to see what their GEMMs ran in."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

GEMMS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.convolution", "aten.linear")


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, -1e9).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int = 32, d: int = 16, heads: int = 2, blocks: int = 1, context: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class VAE(nn.Module):
    """``encode`` and ``decode`` are called by forward, ``embed`` isn't."""

    def __init__(self, d: int = 12, z: int = 4) -> None:
        super().__init__()
        self.body, self.mean, self.logvar = nn.Linear(d, 16), nn.Linear(16, z), nn.Linear(16, z)
        self.up = nn.Parameter(torch.randn(z, 16) / 4)
        self.out = nn.Linear(16, d)

    def encode(self, x):
        h = torch.tanh(self.body(x))
        return self.mean(h), self.logvar(h)

    def decode(self, z):
        return self.out(torch.tanh(z @ self.up))

    def embed(self, x):
        return self.encode(x)[0] @ self.up

    def forward(self, x):
        mean, logvar = self.encode(x)
        return self.decode(mean), mean, logvar


class EncoderDecoder(nn.Module):
    """The encoder is called alone by users, and by forward."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.encoder = Block(d, 2)
        self.query, self.cross, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, y):
        memory = self.encoder(x)
        k, v = self.cross(memory).chunk(2, -1)
        scores = torch.einsum("btd,bsd->bts", self.query(y), k)
        return self.out(F.softmax(scores, -1) @ v), memory


class Bilinear(nn.Module):
    """No layers: a functional matmul in a method, its weight a bare parameter."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d) / 3)

    def score(self, x, y):
        return torch.matmul(x @ self.weight, y.transpose(-2, -1))

    def forward(self, x, y):
        scores = self.score(x, y)
        return F.softmax(scores, -1), scores


@dataclass(frozen=True)
class Subject:
    """A model, its inputs, and its other entries.

    Args:
        build: makes the model.
        inputs: makes the positional arguments.
        entries: name → ``(call(model, *args), part(outputs))``: how a user reaches a part of the model, and what that
            part returned inside ``model(*args)``.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    entries: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def args(self, seed: int = 1) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        return self.inputs()


SUBJECTS = {
    s.name: s
    for s in (
        Subject("gpt", GPT, lambda: (torch.randint(0, 32, (2, 8)),), {}),
        Subject(
            "vae",
            VAE,
            lambda: (torch.randn(3, 12),),
            {
                "encode": (lambda m, x: m.encode(x), lambda out: (out[1], out[2])),
                "decode": (lambda m, x: m.decode(m.encode(x)[0]), lambda out: out[0]),
            },
        ),
        Subject(
            "encoder-decoder",
            EncoderDecoder,
            lambda: (torch.randn(2, 5, 16), torch.randn(2, 3, 16)),
            {"encoder": (lambda m, x, y: m.encoder(x), lambda out: out[1])},
        ),
        Subject(
            "functional",
            Bilinear,
            lambda: (torch.randn(2, 5, 8), torch.randn(2, 3, 8)),
            {"score": (lambda m, x, y: m.score(x, y), lambda out: out[1])},
        ),
    )
}


@pytest.fixture(params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]


@pytest.fixture
def subjects() -> dict[str, Subject]:
    return SUBJECTS


@pytest.fixture
def gpt() -> Subject:
    return SUBJECTS["gpt"]


class GemmDtypes(TorchDispatchMode):
    """Lists every GEMM below autograd with the dtypes of its floating operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(GEMMS):
            floats = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
            self.seen.append((str(func), tuple(floats)))
        return func(*args, **(kwargs or {}))

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtypes in self.seen for dtype in dtypes}


@pytest.fixture
def gemms() -> type[GemmDtypes]:
    return GemmDtypes


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test leaves a mode on the stack; compiled code of one test isn't another's."""
    yield
    torch.compiler.reset()
    assert torch._C._len_torch_function_stack() == 0
