"""Windows over images: views of a padded image, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import Load
from carpool.kernels.resident.operations import op

_MOST_PLACES = 128  # of a window: each is a loop where windows are added up


def each(given: Sequence[int] | int, dims: int) -> tuple[int, ...]:
    """A number for each dimension, as torch reads it: one stands for all."""
    numbers = [given] if isinstance(given, int) else list(given)
    return tuple(numbers * dims if len(numbers) == 1 else numbers)


class Windows:
    """How windows lie over an image: so many (`out`), of this size, so far apart, with so much padding."""

    def __init__(
        self, size: Sequence[int], out: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int],
    ) -> None:  # fmt: skip
        self.size, self.out, self.kernel = tuple(size), tuple(out), tuple(kernel)
        self.stride, self.padding, self.dilation = tuple(stride), tuple(padding), tuple(dilation)
        self.dims = len(self.size)

    @property
    def reach(self) -> tuple[int, ...]:
        """How large an image is that all windows lie in, padding and all."""
        sides = zip(self.size, self.out, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(max(n + p, (o - 1) * s + (k - 1) * d + 1) for n, o, k, s, p, d in sides)

    @property
    def is_inside(self) -> bool:
        """Whether no window reaches over an edge."""
        return not any(self.padding) and self.reach == self.size

    @property
    def are_beside(self) -> bool:
        """Whether each pixel is in one window, and all pixels are."""
        sides = tuple(out * side for out, side in zip(self.out, self.kernel, strict=True))
        return self.stride == self.kernel and sides == self.size and not any(self.padding)

    def padded(self, builder: Builder, image: Value, around: float = 0.0) -> Value:
        """The image with this number around it."""
        if self.is_inside:
            return builder.stored(image)
        made = builder.filled(image.type, (*image.shape[: -self.dims], *self.reach), around)
        builder.into(builder.place(self.inner(builder, made)), image)
        return made

    def inner(self, builder: Builder, image: Value) -> Value:
        """The image without what is around it."""
        lead = len(image.shape) - self.dims
        for dim, (pad, size) in enumerate(zip(self.padding, self.size, strict=True)):
            image = builder.sliced(image, lead + dim, pad, size)
        return image

    def over(self, builder: Builder, padded: Value) -> Value:
        """[..., *out, *kernel] of a padded image, as a view."""
        lead = len(padded.shape) - self.dims

        def move(at: int, strides: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
            own = strides[lead:]
            steps = tuple(step * way for step, way in zip(self.stride, own, strict=True))
            inside = tuple(far * way for far, way in zip(self.dilation, own, strict=True))
            return at, (*strides[:lead], *steps, *inside)

        return builder.view(padded, (*padded.shape[:lead], *self.out, *self.kernel), move)

    def added(self, builder: Builder, seen: Value) -> Value:
        """Of [..., *out, *kernel] the image in which each pixel is the sum of what the windows say of it."""
        lead = len(seen.shape) - 2 * self.dims
        if prod(self.kernel) > _MOST_PLACES:
            raise Refused(f"windows of {prod(self.kernel)} places")
        made = builder.filled(seen.type, (*seen.shape[:lead], *self.reach), 0.0)
        for inside in product(*map(range, self.kernel)):
            part, view = seen, made
            for place in inside:
                part = builder.selected(part, lead + self.dims, place)
            for dim, place in enumerate(inside):
                first = place * self.dilation[dim]
                view = builder.sliced(view, lead + dim, first, self.out[dim], self.stride[dim])
            there = builder.place(view)
            builder.into(there, Value(part.shape, op("add", Load(seen.type, there), part.expr)))
        return self.inner(builder, made)
