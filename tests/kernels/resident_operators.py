"""Small models, each for one operator or a few of a kind, between a layer before and a layer after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

FEATURES, OUTPUTS = 24, 3


class Between(nn.Module):
    """A layer, the operators on what it gives in some shape, and a layer on what they give."""

    def __init__(self, shape: tuple[int, ...], inner: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        size = torch.Size(shape).numel()
        self.before, self.parts = nn.Linear(FEATURES, size), nn.ModuleDict(parts)
        self.shape, self.inner = shape, inner
        with torch.random.fork_rng():
            given = torch.zeros(2, *shape)
            size = self.inner(given, **self.parts).flatten(1).shape[1]
        self.after = nn.Linear(size, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x).unflatten(1, self.shape), **self.parts).flatten(1))


def layered(shape: tuple[int, ...], *layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Between(shape, _applied, **{f"p{place}": make() for place, make in enumerate(layers)})


def _applied(x: Tensor, **parts: nn.Module) -> Tensor:
    for part in parts.values():
        x = part(x)
    return x


def of(shape: tuple[int, ...], function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Between(shape, function)


def _scattered(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]) % 3
    made = torch.zeros(len(x), 3, dtype=x.dtype).scatter_add(1, places.expand_as(x), x)
    return torch.cat([made, x.gather(1, places.flip(0).expand_as(x)), x[:, places[:4]]], 1)


def _masked(x: Tensor) -> Tensor:
    """Softmax over what a mask leaves, and sums along the way."""
    scores = x @ x.transpose(1, 2) / 3
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    return torch.cumsum(weights @ x, 1)


def _put(x: Tensor) -> Tensor:
    """Parts of a tensor set to others."""
    made = torch.zeros_like(x)
    made[:, 1:3] = x[:, 2:4] * 2
    made[:, ::2, 0] = 1.5
    return made + x


def _statistics(x: Tensor) -> Tensor:
    parts = [x.std(-1), x.var(-1, unbiased=False), x.logsumexp(-1), x.norm(dim=-1), x.amax(-1), x.prod(-1)]
    return torch.stack(parts, -1)


def _elementwise(x: Tensor) -> Tensor:
    parts = [
        torch.sin(x), torch.cos(x), torch.atan(x), torch.exp(-x * x), torch.log1p(x * x), torch.expm1(x * 0.1),
        torch.erf(x), torch.rsqrt(x * x + 1), torch.sqrt(x.abs() + 0.1), x.abs().pow(1.7), x.clamp(-0.5, 0.5),
        torch.maximum(x, -x * 0.5), torch.atan2(x, x * x + 1), torch.sinh(x), torch.logaddexp(x, -x),
        torch.where(x > 0, x, x * x), torch.xlogy(x, x * x + 1), torch.square(x), torch.lerp(x, x * x, 0.3),
        torch.addcmul(x, x, x, value=0.5), torch.reciprocal(x * x + 2), torch.frac(x), torch.fmod(x, 0.7),
        torch.nan_to_num(x), torch.sign(x) * x, torch.tan(x * 0.3), torch.asin(x.clamp(-0.9, 0.9)),
        torch.exp2(x), torch.log2(x.abs() + 1), torch.log10(x.abs() + 1), torch.hypot(x, x + 1), torch.sinc(x + 3),
        torch.asinh(x), torch.logit(torch.sigmoid(x), 1e-6), torch.erfc(x), torch.copysign(x, x - 1),
        torch.heaviside(x.detach(), x.detach()) * x, torch.float_power(x.abs() + 1, 1.5).to(x.dtype),
    ]  # fmt: skip
    return torch.cat(parts, 1)


def _shapes(x: Tensor) -> Tensor:
    """Views, and copies that views become."""
    turned = x.movedim(1, -1).flip(1).roll(1, 1)
    parts = [turned, x.repeat(1, 1, 2)[:, :, :4].transpose(1, 2)]
    parts += [torch.diagonal(x, dim1=1, dim2=2)[:, None], x.tril().transpose(1, 2), x.repeat_interleave(2, 1)]
    parts += [
        torch.stack(x.unbind(1)[:2], 1),
        torch.cat(x.chunk(2, 2), 1),
        x.narrow(1, 1, 2),
        x.expand(2, *x.shape)[1],
    ]
    return torch.cat([part.flatten(1) for part in parts], 1)


def _norms(x: Tensor, weight: nn.Module) -> Tensor:
    return (
        F.normalize(weight(x), dim=-1)
        + F.cosine_similarity(x, x.flip(1), -1)[..., None]
        + F.pairwise_distance(x, x * 2)[..., None]
    )


def _attended(x: Tensor, attention: nn.Module) -> Tensor:
    return attention(x, x, x)[0] + F.scaled_dot_product_attention(x, x, x, is_causal=True)


def _recurrent(x: Tensor, net: nn.Module) -> Tensor:
    return net(x)[0]


def _einsum(x: Tensor) -> Tensor:
    return (
        torch.einsum("bij,bkj->bik", x, x)
        + torch.einsum("bij->bi", x)[..., None]
        + torch.outer(x[0, 0], x[0, 1]).sum()
    )


def _conditional(x: Tensor) -> Tensor:
    """Truths, their numbers and what they choose."""
    above = (x > 0.2) & ~(x > 1) | (x < -1)
    share = above.float().mean(1, keepdim=True).to(x.dtype)
    return torch.where(above, x, share) * above.any(1, keepdim=True) + (x.argmax(1, keepdim=True) == 2).to(
        x.dtype
    )


def _glu(x: Tensor) -> Tensor:
    return F.glu(x, 1) + F.silu(x[:, :6]) * F.softmin(x[:, 6:], 1)


_CONV = nn.Conv2d
MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv_1d": layered((3, 8), partial(nn.Conv1d, 3, 4, 3, stride=2, padding=1), nn.Tanh, partial(nn.Conv1d, 4, 2, 2)),
    "conv_1d_same": layered((3, 9), partial(nn.Conv1d, 3, 4, 4, padding="same"), nn.Tanh),
    "conv_2d": layered((2, 5, 6), partial(_CONV, 2, 4, 3, stride=2, padding=1), nn.ReLU, partial(_CONV, 4, 3, (2, 1))),
    "conv_2d_groups": layered((4, 5, 5), partial(_CONV, 4, 8, 3, groups=2, padding=1), partial(_CONV, 8, 8, 3, groups=8)),
    "conv_2d_dilated": layered((2, 7, 7), partial(_CONV, 2, 3, 3, dilation=2, padding=2, bias=False)),
    "conv_2d_circular": layered((2, 5, 5), partial(_CONV, 2, 3, 3, padding=1, padding_mode="circular")),
    "conv_2d_reflect": layered((2, 5, 5), partial(_CONV, 2, 3, 3, padding=1, padding_mode="reflect")),
    "conv_2d_replicate": layered((2, 5, 5), partial(_CONV, 2, 3, 3, padding=1, padding_mode="replicate")),
    "conv_3d": layered((2, 3, 4, 4), partial(nn.Conv3d, 2, 3, 2, padding=(1, 0, 1), stride=(1, 2, 1))),
    "transposed_1d": layered((3, 5), partial(nn.ConvTranspose1d, 3, 4, 3, stride=2, output_padding=1)),
    "transposed_2d": layered((2, 3, 3), partial(nn.ConvTranspose2d, 2, 4, 3, stride=2, padding=1), nn.Tanh),
    "transposed_2d_groups": layered((4, 3, 3), partial(nn.ConvTranspose2d, 4, 6, (2, 3), groups=2, dilation=2)),
    "transposed_3d": layered((2, 2, 3, 2), partial(nn.ConvTranspose3d, 2, 3, 2, stride=(1, 2, 1), bias=False)),
    "max_pool_1d": layered((3, 9), partial(nn.MaxPool1d, 3, stride=2, padding=1)),
    "max_pool_2d": layered((2, 6, 7), partial(nn.MaxPool2d, 3, stride=2, padding=1), partial(nn.MaxPool2d, 2)),
    "max_pool_ceil": layered((2, 6, 7), partial(nn.MaxPool2d, (2, 3), ceil_mode=True)),
    "max_pool_dilated": layered((2, 7, 7), partial(nn.MaxPool2d, 2, stride=1, dilation=2)),
    "max_pool_3d": layered((2, 4, 4, 5), partial(nn.MaxPool3d, 2, padding=1)),
    "avg_pool_1d": layered((3, 9), partial(nn.AvgPool1d, 3, stride=2, padding=1)),
    "avg_pool_2d": layered((2, 6, 7), partial(nn.AvgPool2d, 3, stride=2, padding=1)),
    "avg_pool_ceil": layered((2, 6, 7), partial(nn.AvgPool2d, 3, stride=2, padding=1, ceil_mode=True)),
    "avg_pool_inside": layered((2, 6, 7), partial(nn.AvgPool2d, 3, padding=1, count_include_pad=False)),
    "avg_pool_3d": layered((2, 4, 4, 5), partial(nn.AvgPool3d, 2)),
    "lp_pool": layered((2, 6, 6), partial(nn.LPPool2d, 2, 2)),
    "adaptive_avg": layered((2, 6, 7), partial(nn.AdaptiveAvgPool2d, (2, 3))),
    "adaptive_avg_even": layered((2, 6, 6), partial(nn.AdaptiveAvgPool2d, (2, 3)), partial(nn.AdaptiveAvgPool2d, 1)),
    "adaptive_avg_1d": layered((3, 7), partial(nn.AdaptiveAvgPool1d, 3)),
    "adaptive_max": layered((2, 6, 6), partial(nn.AdaptiveMaxPool2d, (2, 3))),
    "adaptive_max_1d": layered((3, 7), partial(nn.AdaptiveMaxPool1d, 3)),
    "batch_norm_2d": layered((3, 4, 4), partial(nn.BatchNorm2d, 3), nn.ReLU),
    "batch_norm_1d": layered((3, 5), partial(nn.BatchNorm1d, 3), nn.ReLU),
    "instance_norm": layered((3, 4, 4), partial(nn.InstanceNorm2d, 3, affine=True), nn.Tanh),
    "instance_norm_tracked": layered((3, 6), partial(nn.InstanceNorm1d, 3, track_running_stats=True), nn.Tanh),
    "group_norm": layered((4, 4, 4), partial(nn.GroupNorm, 2, 4), nn.SiLU),
    "layer_norm_2d": layered((2, 4, 4), partial(nn.LayerNorm, [4, 4]), nn.GELU),
    "rms_norm": layered((4, 6), partial(nn.RMSNorm, 6), nn.Tanh),
    "local_response": layered((6, 3, 3), partial(nn.LocalResponseNorm, 3)),
    "weight_norm": layered((24,), lambda: parametrizations.weight_norm(nn.Linear(24, 5)), nn.Tanh),
    "spectral_norm": layered((24,), lambda: parametrizations.spectral_norm(nn.Linear(24, 5)), nn.Tanh),
    "lstm": lambda: Between((4, 6), _recurrent, net=nn.LSTM(6, 5, batch_first=True)),
    "gru": lambda: Between((4, 6), _recurrent, net=nn.GRU(6, 5, bidirectional=True, batch_first=True)),
    "attention": lambda: Between((4, 6), _attended, attention=nn.MultiheadAttention(6, 2, batch_first=True)),
    "encoder": layered(
        (4, 6), partial(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.2, batch_first=True, activation="gelu")
    ),
    "upsample_nearest": layered((2, 3, 4), partial(nn.Upsample, scale_factor=2), partial(_CONV, 2, 2, 3)),
    "upsample_nearest_size": layered((2, 3, 4), partial(nn.Upsample, size=(5, 7))),
    "upsample_nearest_1d": layered((2, 5), partial(nn.Upsample, scale_factor=3)),
    "upsample_bilinear": layered((2, 3, 4), partial(nn.Upsample, scale_factor=2, mode="bilinear")),
    "pixel_shuffle": layered((8, 3, 2), partial(nn.PixelShuffle, 2), partial(nn.PixelUnshuffle, 2), nn.Tanh),
    "channel_shuffle": layered((8, 3, 2), partial(nn.ChannelShuffle, 2), partial(_CONV, 8, 2, 1)),
    "fold": layered((2, 5, 5), partial(nn.Unfold, 3, padding=1), partial(nn.Fold, 5, 3, padding=1)),
    "padding": layered((2, 4, 5), partial(nn.ZeroPad2d, (1, -1, 0, 2)), partial(nn.ConstantPad2d, 1, 0.5)),
    "bilinear": lambda: Between((4, 6), lambda x, mix: mix(x, x.flip(1)), mix=nn.Bilinear(6, 6, 3)),
    "scatter_gather": of((9,), _scattered),
    "masked_softmax": of((4, 6), _masked),
    "put": of((5, 4), _put),
    "statistics": of((4, 6), _statistics),
    "elementwise": of((4,), _elementwise),
    "shapes": of((4, 4), _shapes),
    "norms": lambda: Between((4, 6), _norms, weight=nn.Linear(6, 6)),
    "einsum": of((4, 6), _einsum),
    "conditional": of((12,), _conditional),
    "glu": of((12,), _glu),
    "cumulative": of((3, 5), lambda x: torch.cat([x.cumsum(1), x.cumsum(2).flip(2), (x * 0.1).exp().cumprod(2)], 1)),
    "distances": of((5, 3), lambda x: torch.cdist(x, x.flip(1) + 1)),
    "dropouts": layered(
        (4, 3, 3), partial(nn.Dropout2d, 0.3), partial(nn.AlphaDropout, 0.2),
        partial(nn.Hardtanh, -2, 2), partial(nn.Hardshrink, 0.1), partial(nn.Threshold, -1, 0.2),
    ),
    "shrinks": layered((12,), partial(nn.Softshrink, 0.1), nn.Tanhshrink, nn.Softsign),
}  # fmt: skip
