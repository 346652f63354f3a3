"""Random PyTorch jobs in float64, and the plain loop that each is held against."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import carpool
from carpool.result import Result

CLASSES, WIDTH, LENGTH = 3, 6, 5


def _table(seed: int, samples: int) -> dict[str, Tensor]:
    """Inputs of every kind. Labels hang on none of them: what is learnt does not matter here."""
    numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, generator=numbers, dtype=torch.float64)

    return {
        "vector": normal(WIDTH),
        "image": normal(1, 6, 6),
        "sequence": normal(LENGTH, 4),
        "tokens": torch.randint(0, 9, (samples, LENGTH), generator=numbers),
        "labels": torch.randint(0, CLASSES, (samples,), generator=numbers),
    }


# Models. None has a parameter whose true gradient is zero: an adaptive optimizer follows the rounding of such a gradient, so
# that two correct runs differ (docs/fidelity.md). Hence no bias before a BatchNorm, and attention without biases.


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.net = kind(4, 5, batch_first=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, bias=False, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.table(x)).mean(1)))


class Branching(nn.Module):
    """Looks at its data: it runs operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if float(x.detach().sum()) > 0 else self.second(x)


class Noisy(nn.Module):
    """Draws from torch's, NumPy's and Python's generators, in ways that no key replaces."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.net, self._which = nn.Linear(WIDTH, CLASSES), which

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * self._scale()
        return self.net(x)

    def _scale(self) -> Any:
        if self._which == "torch":
            return 1 + torch.multinomial(torch.ones(4, dtype=torch.float64), 1).double() / 8
        return 1 + (np.random.rand() if self._which == "numpy" else random.random()) / 8


def _mlp(*middle: Callable[[], nn.Module], bias: bool = True) -> nn.Module:
    first = nn.Linear(WIDTH, 8, bias=bias)
    return nn.Sequential(first, *(make() for make in middle), nn.Linear(8, CLASSES))


def _conv(*middle: Callable[[], nn.Module], bias: bool = True) -> nn.Module:
    parts = [nn.Conv2d(1, 3, 3, bias=bias), *(make() for make in middle)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(48, CLASSES))


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "mlp": ("vector", lambda: _mlp(nn.Tanh)),
    "relu": ("vector", lambda: _mlp(nn.ReLU)),
    "dropout": ("vector", lambda: _mlp(nn.GELU, partial(nn.Dropout, 0.3))),
    "batch norm": ("vector", lambda: _mlp(partial(nn.BatchNorm1d, 8), nn.Tanh, bias=False)),
    "layer norm": ("vector", lambda: _mlp(partial(nn.LayerNorm, 8), nn.SiLU)),
    "conv": ("image", lambda: _conv(nn.Tanh)),
    "conv norm": ("image", lambda: _conv(partial(nn.BatchNorm2d, 3), nn.Tanh, bias=False)),
    "conv dropout": ("image", lambda: _conv(partial(nn.Dropout2d, 0.2), nn.Tanh)),
    "lstm": ("sequence", lambda: Recurrent(nn.LSTM)),
    "gru": ("sequence", lambda: Recurrent(nn.GRU)),
    "attention": ("sequence", Attention),
    "attention dropout": ("sequence", lambda: Attention(0.2)),
    "tokens": ("tokens", Tokens),
    "branching": ("vector", Branching),
    "noisy torch": ("vector", lambda: Noisy("torch")),
    "noisy numpy": ("vector", lambda: Noisy("numpy")),
    "noisy python": ("vector", lambda: Noisy("python")),
}
RANDOM = {name for name in MODELS if "dropout" in name or "noisy" in name}
"""A plain loop draws other numbers."""
EAGER = ("branching", "noisy torch", "noisy numpy", "noisy python")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, weight_decay=0.1),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
}
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "step": partial(lr_scheduler.StepLR, step_size=1, gamma=0.7),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=4),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=400),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=1e-2),
}
SOURCES = ("arrays", "arrays", "arrays", "arrays", "function", "generator", "noisy generator", "loader")
FAULTS = ("factory", "optimizer", "loss", "callback", "source", "nan")


@dataclass(frozen=True)
class TorchCase:
    name: str
    model: str
    optimizer: str
    lr: float
    scheduler: str
    table: int
    samples: int
    batch_size: int
    epochs: int
    seed: int
    shuffle: bool
    clip_norm: float | None
    accumulate: int
    index: bool
    validates: bool
    patience: int | None
    restore_best: bool
    source: str
    fault: str | None
    moment: int

    @property
    def streams(self) -> bool:
        return self.source in ("generator", "noisy generator", "loader")


def _case(draw: random.Random, number: int, like: TorchCase | None) -> TorchCase:
    """A job; one that is like another has its structure, and numbers of its own."""
    source = like.source if like else draw.choice(SOURCES)
    fault = draw.choice(FAULTS) if draw.random() < 0.12 else None
    validates = like.validates if like else draw.random() < 0.4
    stops = validates and (like.patience is not None if like else draw.random() < 0.5)
    return TorchCase(
        name=f"job {number}",
        model=like.model if like else draw.choice(list(MODELS)),
        optimizer=like.optimizer if like else draw.choice(list(OPTIMIZERS)),
        lr=draw.choice([0.001, 0.003, 0.01, 0.03]),
        scheduler=draw.choice(list(SCHEDULERS)),
        table=draw.randint(0, 2),
        samples=like.samples if like and draw.random() < 0.6 else draw.randint(9, 40),
        batch_size=like.batch_size if like and draw.random() < 0.8 else draw.choice([4, 7, 8, 16]),
        epochs=draw.randint(1, 4),
        seed=draw.choice([0, 0, 1, 2, 3, 2**40 + 1]),
        shuffle=draw.random() < 0.8,
        clip_norm=draw.choice([None, None, 0.1, 1.0]),
        accumulate=like.accumulate if like else draw.choice([1, 1, 1, 2, 3]),
        index=source in ("arrays", "function") and draw.random() < 0.25,
        validates=validates,
        patience=draw.randint(1, 2) if stops else None,
        restore_best=draw.random() < 0.5,
        source=source,
        fault=fault,
        moment=draw.randint(0, 6),
    )


class Raised(RuntimeError):
    """What a fault raises."""


def _arrays(case: TorchCase) -> tuple[Tensor, Tensor]:
    table = _table(case.table, case.samples)
    x = table[MODELS[case.model][0]]
    if case.fault == "nan" and x.is_floating_point():
        x = x.clone()
        x[case.moment % case.samples] = float("nan")
    return x, table["labels"]


def _batches(case: TorchCase, read: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = _arrays(case)
    order = torch.arange(len(x))
    if case.source == "noisy generator":
        order = torch.randperm(len(x))
        x = x + 0.01 * torch.randn(()) + 0.01 * np.random.randn() if x.is_floating_point() else x
    for rows in order.split(case.batch_size):
        if case.fault == "source" and read[0] == case.moment:
            raise Raised("the source has had enough")
        read[0] += 1
        noise = random.random() / 100 if case.source == "noisy generator" and x.is_floating_point() else 0
        yield x[rows] + noise, y[rows]


class Passes:
    """What makes a new generator for each pass."""

    def __init__(self, case: TorchCase) -> None:
        self._case, self._read = case, [0]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return _batches(self._case, self._read)


def _data(case: TorchCase) -> Any:
    if case.source in ("generator", "noisy generator"):
        return Passes(case)
    x, y = _arrays(case)
    if case.source == "loader":
        pairs = torch.utils.data.TensorDataset(x, y)
        return torch.utils.data.DataLoader(pairs, case.batch_size, shuffle=case.shuffle)
    return (lambda: (x, y)) if case.source == "function" else (x, y)


def _index(case: TorchCase) -> np.ndarray | None:
    if not case.index:
        return None
    return np.random.default_rng(case.table).integers(0, case.samples, case.samples - 3)


def _made(case: TorchCase) -> nn.Module:
    if case.fault == "factory":
        raise Raised("no model today")
    return MODELS[case.model][1]().double()


def _loss(case: TorchCase) -> Callable[[Tensor, Tensor], Tensor]:
    if case.fault != "loss":
        return F.cross_entropy
    calls = [0]

    def failing(prediction: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > case.moment:
            raise Raised("the loss is lost")
        return F.cross_entropy(prediction, target)

    return failing


def _optimizer(case: TorchCase) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if case.fault == "optimizer":
            raise Raised("no optimizer today")
        return OPTIMIZERS[case.optimizer](parameters, lr=case.lr)

    return make


def _callbacks(case: TorchCase) -> list[Callable[[Any], None]]:
    def failing(event: Any) -> None:
        if event.epoch == case.moment % case.epochs:
            raise Raised("the callback calls nobody")

    return [failing] if case.fault == "callback" else []


def _validation(case: TorchCase) -> tuple[Tensor, Tensor]:
    table = _table(17, 11)
    return table[MODELS[case.model][0]], table["labels"]


class Torch:
    """PyTorch jobs in float64."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # two are slower where others compute too

    def cases(self, draw: random.Random) -> tuple[list[TorchCase], str]:
        first = _case(draw, 0, None)
        alike = draw.random() < 0.6
        rest = [_case(draw, number, first if alike else None) for number in range(1, draw.randint(1, 8))]
        cases = [first, *rest]
        return cases, self._strategy(draw, cases, alike)

    def _strategy(self, draw: random.Random, cases: list[TorchCase], alike: bool) -> str:
        kind = cases[0]
        fuses = alike and kind.model not in EAGER and not kind.streams
        if fuses and all(case.fault in (None, "callback", "nan") for case in cases) and draw.random() < 0.4:
            return "fused"
        return draw.choice(["auto", "auto", "interleaved", "in_turn"])

    def build(self, case: TorchCase) -> carpool.Job:
        stop = None
        if case.patience is not None:  # without min_delta a plateau would be decided by the last bit
            stop = carpool.EarlyStopping("val_loss", case.patience, 1e-4, restore_best=case.restore_best)
        return carpool.Job(
            partial(_made, case),
            _data(case),
            name=case.name,
            loss=_loss(case),
            optimizer=_optimizer(case),
            scheduler=SCHEDULERS[case.scheduler],
            validation_data=_validation(case) if case.validates else None,
            batch_size=case.batch_size,
            epochs=case.epochs,
            seed=case.seed,
            shuffle=case.shuffle,
            index=_index(case),
            clip_norm=case.clip_norm,
            accumulate=case.accumulate,
            stop=stop,
            callbacks=_callbacks(case),
        )

    def weights(self, result: Result) -> Mapping[str, np.ndarray]:
        return {name: leaf.detach().numpy() for name, leaf in result.model.state_dict().items()}

    def alone(self, case: TorchCase, strategy: str) -> str:
        return "in_turn"

    def allowed(self, case: TorchCase, exact: bool) -> float:
        return 0.0 if exact else 1e-8

    def by_hand(self, case: TorchCase) -> Mapping[str, np.ndarray] | None:
        if case.model in RANDOM or case.source == "loader" or case.fault is not None:
            return None
        return {name: leaf.numpy() for name, leaf in PlainLoop(case).trained().items()}


class PlainLoop:
    """The loop that everybody writes."""

    def __init__(self, case: TorchCase) -> None:
        self._case = case
        self._passes = self._read()
        with torch.random.fork_rng():
            torch.manual_seed(case.seed)
            self._model = _made(case)
        self._optimizer = _optimizer(case)(self._model.parameters())
        make = SCHEDULERS[case.scheduler]
        self._scheduler: Any = make(self._optimizer) if make else None
        self._by_step = case.scheduler == "one cycle"

    def _read(self) -> list[list[tuple[Tensor, Tensor]]]:
        """The batches of each epoch. What a generator draws it draws from the process's generators as they are now."""
        case = self._case
        if case.streams:
            states = random.getstate(), np.random.get_state(), torch.get_rng_state()
            source = Passes(case)
            read = [list(source) for _ in range(case.epochs)]
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
            return read
        return [self._arranged(epoch) for epoch in range(case.epochs)]

    def _arranged(self, epoch: int) -> list[tuple[Tensor, Tensor]]:
        case, (x, y), index = self._case, _arrays(self._case), _index(self._case)
        places = torch.arange(len(x)) if index is None else torch.from_numpy(index)
        if case.shuffle:
            places = places[torch.from_numpy(carpool.batch_order(case.seed, epoch, len(places)))]
        return [(x[rows], y[rows]) for rows in places.split(case.batch_size)]

    def trained(self) -> dict[str, Tensor]:
        best, best_state, waited = float("inf"), {}, 0
        for batches in self._passes:
            loss = self._epoch(batches)
            watched = self._validated() if self._case.validates else loss
            if self._scheduler is not None and not self._by_step:
                self._scheduler.step(*[watched] * (self._case.scheduler == "plateau"))
            if self._case.patience is None:
                continue
            if watched < best - 1e-4:
                best, waited = watched, 0
                best_state = copy.deepcopy(self._model.state_dict())
            else:
                waited += 1
                if waited >= self._case.patience:
                    break
        keeps = self._case.patience is not None and self._case.restore_best and best_state
        return best_state if keeps else self._model.state_dict()

    def _epoch(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        case, total = self._case, 0.0
        self._model.train()
        for number, (x, y) in enumerate(batches):
            if number % case.accumulate == 0:
                self._optimizer.zero_grad()
            loss = F.cross_entropy(self._model(x), y)
            (loss / case.accumulate).backward()
            total += float(loss) * len(x)
            if (number + 1) % case.accumulate == 0 or number + 1 == len(batches):
                if case.clip_norm is not None:
                    nn.utils.clip_grad_norm_(self._model.parameters(), case.clip_norm)
                self._optimizer.step()
                if self._scheduler is not None and self._by_step:
                    self._scheduler.step()
        return total / sum(len(x) for x, _ in batches)

    def _validated(self) -> float:
        x, y = _validation(self._case)
        self._model.eval()
        with torch.no_grad():
            total = sum(
                float(F.cross_entropy(self._model(part), target)) * len(part)
                for part, target in zip(
                    x.split(self._case.batch_size), y.split(self._case.batch_size), strict=True
                )
            )
        self._model.train()
        return total / len(x)


MADE = Torch()
