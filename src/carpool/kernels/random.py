"""Random operators for torch keyed by (seed, step, call, element), never by a global generator.

Under `Keyed`, dropout and its kin, `torch.rand`, `torch.randn`, `torch.bernoulli` and the in-place samplers take their
numbers from Philox (`carpool.random`): equal alone, vmapped and compiled. An operator that is not here still draws from
torch's generator; a vmapped trace refuses it by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from carpool.random import philox, signed_seed

_MASK = 0xFFFFFFFF
_NONE: Mapping[Any, Callable[..., Any]] = MappingProxyType({})


class Keyed(TorchFunctionMode):
    """Keys every random operator inside by a job's seed and step, and by the number of the call.

    `seed` and `step` are integers or 0-d int64 tensors (batched ones under vmap). `operators` are run in place of
    torch's own functions (`carpool.kernels.table`); one that answers NotImplemented leaves the call to torch. The phases
    of a step each count their calls from a place of their own, so that one which sits out shifts nothing.
    """

    def __init__(
        self, seed: Any, step: Any, operators: Mapping[Any, Callable[..., Any]] = _NONE, phase: int = 0
    ) -> None:
        super().__init__()
        self.seed, self.step, self.call = seed, step, phase << 24
        self.operators = operators
        self._first = self.call

    @property
    def drawn(self) -> bool:
        """Whether any random operator was called."""
        return self.call > self._first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sampler, operator = _SAMPLERS.get(func), self.operators.get(func)
        if sampler is not None and kwargs.get("generator") is None:
            return sampler(self, *args, **kwargs)
        if operator is not None:
            with self:  # torch takes a mode off while it answers; what the operator calls is to be seen too
                made = operator(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)

    @contextmanager
    def rewound(self, call: int) -> Iterator[None]:
        """The mode on again from an earlier call, for what is computed a second time."""
        before, self.call = self.call, call
        try:
            with self:
                yield
        finally:
            self.call = before

    def uniform(self, shape: Sequence[int], device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Numbers in [0, 1) for the next call: 24 bits each, four to a counter."""
        drawn = uniform(
            _tensor(self.seed), _tensor(self.step), self.call, math.prod(shape), torch.device(device)
        )
        self.call += 1
        return drawn.reshape(tuple(shape)).to(dtype)

    def normal(self, shape: Sequence[int], device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal numbers by Box and Muller."""
        radius = torch.sqrt(-2 * torch.log(self.uniform(shape, device) + 2.0**-25))
        return (radius * torch.cos(2 * math.pi * self.uniform(shape, device))).to(dtype)


def _tensor(number: Any) -> Tensor:
    return number if isinstance(number, Tensor) else torch.tensor(signed_seed(number))


# One operator of a trace: written out it is some 300, and a deep network has a dropout for each of its layers.


@torch.library.custom_op("carpool::uniform", mutates_args=())
def uniform(seed: Tensor, step: Tensor, call: int, count: int, device: torch.device) -> Tensor:
    """`count` numbers in [0, 1) for each pair of seed and step, which are of any one shape, or single numbers."""
    return _written_out(seed, step, call, count, device)


def _written_out(seed: Tensor, step: Tensor, call: int, count: int, device: torch.device) -> Tensor:
    seed, step = (one[..., None] if one.dim() else one for one in (seed, step))
    quad = torch.arange(-(-count // 4), device=device, dtype=torch.int64)
    words = philox((quad, call, step & _MASK, (step >> 32) & _MASK), (seed & _MASK, (seed >> 32) & _MASK))
    bits = torch.stack(words, dim=-1).flatten(-2)[..., :count] >> 8
    # float64 first would keep no more bits: 24 fit float32 exactly.
    return bits.to(torch.float32).mul(2.0**-24)


@uniform.register_fake
def _(seed: Tensor, step: Tensor, call: int, count: int, device: torch.device) -> Tensor:
    for one in (seed, step):
        if one.dim() and one.device != device:
            raise RuntimeError(f"random numbers on {device} cannot be keyed by numbers on {one.device}")
    shape = torch.broadcast_shapes(seed.shape, step.shape)
    return torch.empty((*shape, count), dtype=torch.float32, device=device)


@uniform.register_vmap
def _(info: Any, in_dims: Any, seed: Tensor, step: Tensor, *rest: Any) -> tuple[Tensor, int]:
    pair = zip((seed, step), in_dims, strict=False)
    seed, step = (
        one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0) for one, dim in pair
    )
    return uniform(seed, step, *rest), 0


def compiled_forms() -> dict[Any, Callable[..., Tensor]]:
    """What the compiler is given in place of the operator."""
    return {torch.ops.carpool.uniform.default: _written_out}


def _dropout(
    key: Keyed, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return _dropped(key, input, p, training, input.shape)


def _torch_dropout(key: Keyed, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return _dropped(key, input, p, train, input.shape)


def _channels(batched_dims: int) -> Callable[..., torch.Tensor]:
    def drop(
        key: Keyed, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        lead = 2 if input.dim() >= batched_dims else 1  # without a batch dimension the channels come first
        return _dropped(key, input, p, training, input.shape[:lead] + (1,) * (input.dim() - lead))

    return drop


def _dropped(
    key: Keyed, input: torch.Tensor, p: float, training: bool, mask_shape: Sequence[int]
) -> torch.Tensor:
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0
    keep = key.uniform(mask_shape, input.device) >= p
    return torch.where(keep, input / (1 - p), torch.zeros_like(input))


_ALPHA = 1.7580993408473766  # SELU's negative saturation, as in torch's own alpha dropout


def _alpha_dropout(
    key: Keyed, input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    keep = key.uniform(input.shape, input.device) >= p
    return torch.where(keep, input, torch.full_like(input, -_ALPHA)) * scale + _ALPHA * scale * p


def _like(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def sample(
        key: Keyed, input: torch.Tensor, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> torch.Tensor:
        return draw(key, input.shape, device or input.device, dtype or input.dtype)

    return sample


def _sized(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def sample(
        key: Keyed, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
    ) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        made = draw(
            key, tuple(shape), device or torch.get_default_device(), dtype or torch.get_default_dtype()
        )
        return made.requires_grad_() if requires_grad else made

    return sample


def _bernoulli(key: Keyed, input: torch.Tensor, p: float | None = None, **_: Any) -> torch.Tensor:
    chance = input if p is None else p
    return (key.uniform(input.shape, input.device) < chance).to(input.dtype)


def _bernoulli_(key: Keyed, input: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    return input.copy_(key.uniform(input.shape, input.device) < p)


def _uniform_(key: Keyed, input: torch.Tensor, a: float = 0.0, b: float = 1.0, **_: Any) -> torch.Tensor:
    return input.copy_(key.uniform(input.shape, input.device) * (b - a) + a)


def _normal_(key: Keyed, input: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return input.copy_(key.normal(input.shape, input.device) * std + mean)


def _exponential_(key: Keyed, input: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return input.copy_(-torch.log1p(-key.uniform(input.shape, input.device)) / lambd)


def _normal(
    key: Keyed,
    mean: Any,
    std: Any = 1.0,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> torch.Tensor:
    given = next((one for one in (mean, std) if isinstance(one, torch.Tensor)), None)
    if given is not None:
        shape = torch.broadcast_shapes(*(one.shape for one in (mean, std) if isinstance(one, torch.Tensor)))
        return key.normal(shape, given.device, given.dtype) * std + mean
    place, kind = device or torch.get_default_device(), dtype or torch.get_default_dtype()
    return (key.normal(tuple(size), place) * std + mean).to(kind)


def _randint(
    key: Keyed,
    *bounds: Any,
    low: Any = 0,
    high: Any = None,
    size: Any = None,
    dtype: Any = None,
    device: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Numbers below 2**24 apart: 24 bits decide."""
    given = [*bounds] if size is None else [*bounds, size]
    size = given.pop()
    low, high = given if len(given) == 2 else (low, given[0] if given else high)
    made = key.uniform(tuple(size), device or torch.get_default_device()) * (high - low)
    return (made.floor() + low).to(dtype or torch.int64)


def _gumbel_softmax(
    key: Keyed, logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Here because torch runs the inside of a composite function outside the mode."""
    noise = -torch.log(-torch.log1p(-key.uniform(logits.shape, logits.device, logits.dtype)) + 2.0**-25)
    soft = torch.softmax((logits + noise) / tau, dim)
    if not hard:
        return soft
    best = torch.zeros_like(soft).scatter(dim, soft.argmax(dim, keepdim=True), 1.0)
    return best - soft.detach() + soft


_SAMPLERS: dict[Any, Callable[..., torch.Tensor]] = {
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.dropout1d: _channels(3),
    F.dropout2d: _channels(3),  # torch too reads a 3-d input as (batch, channel, length)
    F.dropout3d: _channels(5),
    F.alpha_dropout: _alpha_dropout,
    F.gumbel_softmax: _gumbel_softmax,
    torch.rand: _sized(Keyed.uniform),
    torch.randn: _sized(Keyed.normal),
    torch.rand_like: _like(Keyed.uniform),
    torch.randn_like: _like(Keyed.normal),
    torch.normal: _normal,
    torch.randint: _randint,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.normal_: _normal_,
    torch.Tensor.exponential_: _exponential_,
}
