"""Jobs whose input is slow: three loaders of 20 ms a batch, and a folder of JPEGs read and augmented by DataLoaders.

One after another is a plain loop over the same loader; together is `carpool.train`. Ratios are of medians of alternating windows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import carpool

JOBS, BATCHES, WAIT_S, EPOCHS = 3, 20, 0.02, 2
IMAGES, SIDE, CROP = 384, 96, 64


class Slow:
    """Batches that take 20 ms each to come, without using a core: a disk or a network."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(BATCHES, 32, 64, generator=generator)
        self._y = torch.randint(0, 10, (BATCHES, 32), generator=generator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(self._x, self._y, strict=True):
            time.sleep(WAIT_S)
            yield x, y


class Pictures(Dataset[Any]):
    """JPEGs from a folder, cropped and flipped at random."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self._paths[place]) as picture:
            pixels = np.asarray(picture, dtype=np.float32) / 255
        top, left, flip = torch.randint(0, SIDE - CROP, (3,)).tolist()
        pixels = pixels[top : top + CROP, left : left + CROP]
        pixels = pixels[:, ::-1] if flip % 2 else pixels
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1), place % 10


def draw(folder: Path) -> None:
    """Pictures of noise that JPEG has work with."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        coarse = rng.integers(0, 255, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse.repeat(8, 0).repeat(8, 1)).save(folder / f"{number:04}.jpg", quality=90)


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def run(device: str, windows: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Every measurement, with its ratio."""
    found: dict[str, Any] = {"windows": windows}
    made = [partial(_mlp, 32 + 16 * i) for i in range(JOBS)]
    found["20 ms loaders, 3 different models"] = _compared(
        made, lambda: [Slow(i) for i in range(JOBS)], device, windows, say
    )
    with tempfile.TemporaryDirectory() as name:
        draw(Path(name))
        nets = [partial(cnn, 4 + i) for i in range(JOBS)]
        found["JPEG folder, a DataLoader with 1 worker each, 3 different models"] = _compared(
            nets,
            lambda: [DataLoader(Pictures(Path(name)), 32, num_workers=1) for _ in range(JOBS)],
            device,
            windows,
            say,
        )
        shared = [partial(cnn, 4)] * 8
        found["JPEG folder, one DataLoader shared by 8 models of one structure"] = _compared(
            shared,
            lambda: [DataLoader(Pictures(Path(name)), 32, num_workers=1)] * 8,
            device,
            windows,
            say,
        )
    return found


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def _compared(
    made: list[Callable[[], nn.Module]],
    loaders: Callable[[], list[Any]],
    device: str,
    windows: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    turns: list[float] = []
    together: list[float] = []
    for _ in range(windows):
        turns.append(_timed(lambda: _in_turn(made, loaders(), device)))
        together.append(_timed(lambda: _together(made, loaders(), device)))
        say(f"in turn {turns[-1]:.2f} s, together {together[-1]:.2f} s")
    ratio = round(median(turns) / median(together), 2)
    return {"in_turn_s": turns, "together_s": together, "ratio": ratio}


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _in_turn(made: list[Callable[[], nn.Module]], loaders: list[Any], device: str) -> None:
    for make, loader in zip(made, loaders, strict=True):
        torch.manual_seed(0)
        model = make().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()


def _together(made: list[Callable[[], nn.Module]], loaders: list[Any], device: str) -> None:
    jobs = [
        carpool.Job(
            make,
            loader,
            name=f"job {i}",
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.Adam, lr=1e-3),
            epochs=EPOCHS,
        )
        for i, (make, loader) in enumerate(zip(made, loaders, strict=True))
    ]
    for result in carpool.train(jobs, device=device, reporters=[]):
        if result.error is not None:
            raise result.error
