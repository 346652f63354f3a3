"""The second half of the torch zoo: models that need carpool's own operators to be stacked (`carpool.kernels.table`).

They are crossed with one optimizer only: what an optimizer does to a stack does not depend on the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from zoo import BATCH, OPTIMIZERS, SCHEDULERS, TorchZoo, _Make

from carpool.job import Job
from carpool.testing import Variant

SAMPLES, LENGTH, WIDTH = 64, 3, 4  # whole batches only: each shape is a trace more


class Recurrent(nn.Module):
    """A recurrent net over a series, and what it ends with."""

    def __init__(self, kind: Any, ways: int = 1, **options: Any) -> None:
        super().__init__()
        self.net = kind(WIDTH, 4, bidirectional=ways == 2, **options)
        self.batch_first = options.get("batch_first", False)
        self.out = nn.Linear(ways * (options.get("proj_size", 0) or 4), 3)

    def forward(self, x):
        outputs, last = self.net(x if self.batch_first else x.transpose(0, 1))
        first = last[0] if isinstance(last, tuple) else last
        return self.out(outputs.mean(1 if self.batch_first else 0)) + first.mean()


class Heads(nn.Module):
    """Attention by torch's function: causal, masked, scaled, with fewer heads for keys than for queries."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, size) for size in (8, 4, 4, 3))
        self.dropout = dropout

    def forward(self, x):
        def heads(t, number):
            return t.unflatten(-1, (number, 2)).transpose(1, 2)

        q, k, v = heads(self.q(x), 4), heads(self.k(x), 2), heads(self.v(x), 2)
        p = self.dropout if self.training else 0.0
        causal = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(
            1
        )  # the last query sees nothing
        masked = F.scaled_dot_product_attention(causal[:, :2], k, v, seen, dropout_p=p, scale=0.3)
        return self.out(masked.transpose(1, 2).flatten(2).mean(1)) + causal.mean()


class Multihead(nn.Module):
    """`nn.MultiheadAttention` with and without its weights, with a mask and padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.b = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True, bias=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        padding = x[:, :, 0] > 1.5
        padding = padding & padding.new_tensor([False, True, True])  # something is left to attend to
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        y, weights = self.a(x, x, x, key_padding_mask=padding)
        z, _ = self.b(y, y, y, need_weights=False, attn_mask=causal)
        w, _ = self.b(z, x, x, need_weights=False)
        return self.out((z + w).mean(1)) + weights.square().mean()


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        return self.out(self.encoder(x, mask).mean(1))


class Decoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 6, dropout, batch_first=True, norm_first=True)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.layer(x, torch.tanh(x)).mean(1))


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, one inside another."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(dropout)

    def inner(self, h):
        return self.drop(torch.tanh(self.b(h)))

    def block(self, x):
        h = self.drop(torch.tanh(self.a(x)))
        return h + checkpoint(self.inner, h, use_reentrant=False)

    def forward(self, x):
        return self.out(self.drop(checkpoint(self.block, x, use_reentrant=False)).mean(1))


class Formulas(nn.Module):
    """Operators without a batching rule of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mix = nn.EmbeddingBag(5, WIDTH), nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x):
        return self.mix(self.bag((x[:, :, 0] > 0).long()), x.mean(1))


def over_time(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh(), nn.Linear(5, 3))


def weight_norm() -> nn.Module:
    every: Any = None  # one norm for the whole matrix
    last = parametrizations.weight_norm(nn.Linear(5, 3), dim=every)
    return nn.Sequential(over_time(parametrizations.weight_norm(nn.Linear(LENGTH * WIDTH, 5)))[:-1], last)


def spectral_norm() -> nn.Module:
    return over_time(parametrizations.spectral_norm(nn.Linear(LENGTH * WIDTH, 5), n_power_iterations=2))


def orthogonal() -> nn.Module:
    return over_time(parametrizations.orthogonal(nn.Linear(LENGTH * WIDTH, 5)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": partial(Recurrent, nn.LSTM, 2, num_layers=2, batch_first=True),
    "lstm_projected": partial(Recurrent, nn.LSTM, proj_size=2, bias=False),
    "gru": partial(Recurrent, nn.GRU, 2, num_layers=2),
    "rnn_tanh": partial(Recurrent, nn.RNN, batch_first=True),
    "rnn_relu": partial(Recurrent, nn.RNN, nonlinearity="relu"),
    "heads": Heads,
    "multihead": Multihead,
    "encoder": Encoder,
    "decoder": Decoder,
    "checkpointed": Checkpointed,
    "formulas": Formulas,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "orthogonal": orthogonal,
    "lstm_dropout": partial(Recurrent, nn.LSTM, 2, num_layers=2, dropout=0.3, batch_first=True),
    "gru_dropout": partial(Recurrent, nn.GRU, num_layers=3, dropout=0.3),
    "heads_dropout": partial(Heads, 0.3),
    "multihead_dropout": partial(Multihead, 0.3),
    "encoder_dropout": partial(Encoder, 0.3),
    "checkpointed_dropout": partial(Checkpointed, 0.3),
}


@cache
def series(double: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The data: the same objects for equal arguments, so that members share them."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(SAMPLES, LENGTH, WIDTH)))
    return x if double else x.float(), torch.from_numpy(rng.integers(0, 3, SAMPLES))


class OperatorZoo(TorchZoo):
    """The operators' half of the suite: mixed into `AdapterConformance`."""

    models = tuple(MODELS)
    random_models = tuple(name for name in MODELS if name.endswith("_dropout"))
    fuses = tuple(MODELS)
    optimizers = ("sgd_momentum",)
    schedulers = ("exponential",)

    def job(self, model: str, optimizer: str, scheduler: str, variant: Variant, double: bool = True) -> Job:
        kind, rate = OPTIMIZERS[optimizer]
        return Job(
            _Make(MODELS[model], double),
            data=series(double),
            loss=F.cross_entropy,
            optimizer=partial(kind, lr=rate * variant.scale),
            scheduler=SCHEDULERS[scheduler],
            batch_size=BATCH,
            epochs=variant.epochs,
            seed=variant.seed,
            **variant.options,
        )
