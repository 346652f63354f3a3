"""The models and data that every way trains: small synthetic problems that can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.resnet import resnet
from benchmarks.shapes import CLASSES, LENGTH, SMALL_RESNET_BLOCKS, SMALL_RESNET_WIDTHS, TOKENS


@dataclass(frozen=True)
class Member:
    """What one model of a sweep has of its own."""

    seed: int
    lr: float


@dataclass(frozen=True)
class Data:
    """All samples, on one device."""

    x: Tensor
    y: Tensor

    def to(self, device: str) -> Data:
        return Data(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Workload:
    """A structure, its data, and what it is computed in. `make` takes nothing, so that a seed decides the weights."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Data]
    batch_size: int
    samples: int
    precision: str = "tf32"

    @property
    def epoch_steps(self) -> int:
        return self.samples // self.batch_size

    def data(self) -> Data:
        """The samples; the same ones every time."""
        return _drawn(self)


def _drawn(workload: Workload) -> Data:
    key = (workload.name, workload.samples, workload.title)
    if key not in _draws:
        _draws[key] = workload.draw(workload.samples, torch.Generator().manual_seed(0))
    return _draws[key]


_draws: dict[tuple[str, int, str], Data] = {}


def sweep(count: int) -> tuple[Member, ...]:
    """So many members: learning rates from 1e-4 to 1e-2, a seed each."""
    return tuple(Member(seed, float(lr)) for seed, lr in enumerate(np.logspace(-4, -2, count)))


def sampled(members: tuple[Member, ...], count: int) -> tuple[Member, ...]:
    """Members spread evenly over the sweep, the first and the last among them."""
    places = np.linspace(0, len(members) - 1, min(count, len(members)))
    return tuple(members[round(place)] for place in places)


def loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Cross entropy over samples, or over all tokens of all samples."""
    return F.cross_entropy(prediction.flatten(0, -2), target.flatten())


def accuracy(prediction: Tensor, target: Tensor) -> Tensor:
    """The share of targets that were met."""
    return (prediction.argmax(-1) == target).float().mean()


# Models


def tiny_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
    )


def small_cnn() -> nn.Module:
    return nn.Sequential(*_block(1, 8), *_block(8, 16), nn.Flatten(), nn.Linear(16 * 4 * 4, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        *_block(3, 32), *_block(32, 64), *_block(64, 64), nn.Flatten(), nn.Linear(64 * 4 * 4, CLASSES)
    )


def _block(inside: int, outside: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


class Attention(nn.Module):
    """Self-attention with the softmax written out, as many people's own code has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        seen = torch.softmax(scores, -1) @ value
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A transformer layer, normalised before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Tokens in, a token for each out."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.out = nn.Linear(width, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.tokens(x) + self.places))


# Data


def _labelled(shape: tuple[int, ...], samples: int, generator: torch.Generator) -> Data:
    """Noise whose class is what a hidden linear map says."""
    x = torch.randn(samples, *shape, generator=generator)
    hidden = torch.randn(x[0].numel(), CLASSES, generator=generator)
    return Data(x, (x.flatten(1) @ hidden).argmax(-1))


def vectors(length: int, samples: int, generator: torch.Generator) -> Data:
    """Vectors of any length."""
    return _labelled((length,), samples, generator)


def _vectors(samples: int, generator: torch.Generator) -> Data:
    return vectors(32, samples, generator)


def _digits(samples: int, generator: torch.Generator) -> Data:
    return _labelled((784,), samples, generator)


def _small_images(samples: int, generator: torch.Generator) -> Data:
    return _labelled((1, 16, 16), samples, generator)


def _images(samples: int, generator: torch.Generator) -> Data:
    return _labelled((3, 32, 32), samples, generator)


def _texts(samples: int, generator: torch.Generator) -> Data:
    """Random tokens, each to be replaced by its partner in a hidden cipher."""
    x = torch.randint(0, TOKENS, (samples, LENGTH), generator=generator)
    return Data(x, torch.randperm(TOKENS, generator=generator)[x])


WORKLOADS = {
    one.name: one
    for one in (
        Workload("small-mlp", "MLP 32-64-10", tiny_mlp, _vectors, batch_size=32, samples=1024),
        Workload(
            "small-cnn", "CNN, 2 convolutions, 16×16", small_cnn, _small_images, batch_size=32, samples=1024
        ),
        Workload("tiny", "tiny MLP 32-64-10", tiny_mlp, _vectors, batch_size=32, samples=8192),
        Workload("mlp", "MLP 784-256-256-10", mlp, _digits, batch_size=128, samples=8192),
        Workload("cnn", "CNN, 3 convolutions, 32×32", cnn, _images, batch_size=128, samples=4096),
        Workload("tfm", "transformer d128 L2 T64", Transformer, _texts, batch_size=32, samples=2048),
        Workload("resnet", "ResNet-18, 32×32", resnet, _images, batch_size=128, samples=512),
        Workload(
            "small-resnet",
            "ResNet of two blocks, 32×32",
            partial(resnet, SMALL_RESNET_WIDTHS, SMALL_RESNET_BLOCKS),
            _images,
            batch_size=8,
            samples=32,
        ),
    )
}
