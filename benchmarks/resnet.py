"""ResNet-18 for small images: a 3×3 stem and no pooling before the first stage, as everyone has it for 32×32 pixels."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.shapes import CLASSES, RESNET_BLOCKS, RESNET_WIDTHS


class Block(nn.Module):
    """Two normalised convolutions beside a shortcut, which is projected where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inside, outside, 3, stride)
        self.second = _convolution(outside, outside, 3, 1)
        changes = stride != 1 or inside != outside
        self.shortcut = _convolution(inside, outside, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet(widths: tuple[int, ...] = RESNET_WIDTHS, blocks: int = RESNET_BLOCKS) -> nn.Module:
    """A stage for each width, every stage after the first at half the size of the one before."""
    stages: list[nn.Module] = []
    for number, (inside, outside) in enumerate(pairwise((widths[0], *widths))):
        for place in range(blocks):
            stride = 2 if number and not place else 1
            stages.append(Block(inside if not place else outside, outside, stride))
    return nn.Sequential(
        _convolution(3, widths[0], 3, 1),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], CLASSES),
    )


def _convolution(inside: int, outside: int, size: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outside)
    )
