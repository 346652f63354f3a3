"""`Stack`: one fused step for many models in a training loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from carpool import adapters
from carpool.arguments import Arguments, hinted
from carpool.errors import ModelError, OptimizerError, OptionError, sentence


class Stack:
    """Models of one structure, each with its optimizer, advanced by one launch a step in your own loop.

    The stack holds weights and optimizer state between steps; `stack[i]`, `stack.sync()` and leaving a `with` block write
    them into your own objects. Learning rates and other hyper-parameters are read from your optimizers at each step, so
    your schedulers work as usual. Steps run on the models' device, in the train/eval modes that the models have when the
    stack is made. Random layers are keyed by member (`seeds`, 0, 1, ... unless given) and by step.

    >>> import torch, carpool
    >>> models = [torch.nn.Linear(4, 1) for _ in range(3)]
    >>> optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in zip(models, [0.1, 0.01, 0.001])]
    >>> x, y = torch.randn(16, 4), torch.randn(16, 1)
    >>> with carpool.Stack(models, optimizers) as stack:
    ...     for _ in range(5):
    ...         losses = stack.step(torch.nn.functional.mse_loss, x, y)
    >>> losses.shape, stack(x).shape, stack[1] is models[1]
    (torch.Size([3]), torch.Size([3, 16, 1]), True)
    """

    def __init__(
        self,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        *,
        seeds: Sequence[int] | None = None,
        compile: bool = False,
    ) -> None:
        models = Arguments(ModelError).listed("models", models, "pass [model, ...]")
        optimizers = Arguments(OptimizerError).listed("optimizers", optimizers, "pass [optimizer, ...]")
        compile = Arguments().flag("compile", compile)
        if not models:
            raise ModelError(sentence("at least one model", "none", "pass a list of models"))
        if len(optimizers) != len(models):
            raise OptimizerError(
                sentence(f"{len(models)} optimizers, one a model", str(len(optimizers)), "pass one for each")
            )
        seeds = list(range(len(models))) if seeds is None else _whole(seeds)
        if len(seeds) != len(models):
            raise OptionError(
                sentence(
                    f"{len(models)} seeds, one a model", str(len(seeds)), "leave seeds out for 0, 1, ..."
                )
            )
        self._kept = adapters.claiming(models[0])().stack(models, optimizers, seeds, compile)

    # Steps

    @overload
    def step(
        self,
        loss: Callable[[Any, Any], Any],
        x: Any,
        y: Any,
        /,
        *,
        each: bool = False,
        clip_norm: float | None = None,
    ) -> Any: ...
    @overload
    def step(
        self, *batch: Any, step: Callable[..., Any], each: bool = False, clip_norm: float | None = None
    ) -> Any: ...
    def step(
        self,
        *arguments: Any,
        step: Callable[..., Any] | None = None,
        each: bool = False,
        clip_norm: float | None = None,
    ) -> Any:
        """Forward, backward and update of every active member on one batch: their losses, a tensor `(members,)`.

        `step(loss, x, y)` minimises `loss(model(x), y)`; `step(*batch, step=function)` minimises
        `function(model, *batch)`. With `each=True` every array has a first dimension of members, a batch for each. A
        member whose loss is not finite is left as it was and shows that loss; a dropped one shows NaN.
        """
        if clip_norm is not None:
            clip_norm = Arguments().number("a clip_norm", clip_norm, "pass a positive norm or None", above=0)
        return self._kept.step(arguments, step, Arguments().flag("each", each), clip_norm)

    @overload
    def evaluate(self, loss: Callable[[Any, Any], Any], x: Any, y: Any, /, *, each: bool = False) -> Any: ...
    @overload
    def evaluate(self, *batch: Any, step: Callable[..., Any], each: bool = False) -> Any: ...
    def evaluate(self, *arguments: Any, step: Callable[..., Any] | None = None, each: bool = False) -> Any:
        """Every member's loss on a batch in evaluation mode, dropped ones too; nothing changes."""
        return self._kept.evaluate(arguments, step, Arguments().flag("each", each))

    def __call__(self, inputs: Any, *, each: bool = False) -> Any:
        """Every member's predictions in evaluation mode, members first; inputs are those of `carpool.predict`."""
        return self._kept.predict(inputs, Arguments().flag("each", each))

    # Members

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def active(self) -> tuple[int, ...]:
        """The positions of the members that have not been dropped."""
        return self._kept.active

    def __getitem__(self, position: int) -> Any:
        """Your own model at this position, with its current weights, and its optimizer with its current state."""
        return self._kept.model(self._place(position))

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def sync(self) -> None:
        """Writes every member's weights and optimizer state into your own objects."""
        self._kept.sync()

    def load(self, position: int) -> None:
        """Takes a member's weights and optimizer state from your own objects, after you have changed them."""
        self._kept.load(self._place(position))

    def drop(self, position: int) -> None:
        """The member keeps what it has and takes part in no more steps; no bit of the others changes."""
        self._kept.drop(self._place(position))

    def _place(self, position: int) -> int:
        return Arguments().place(position, len(self), "positions stay when one is dropped")

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()

    def __repr__(self) -> str:
        return f"Stack({len(self)} models, {len(self.active)} active)"


def _whole(seeds: Any) -> list[int]:
    listed = Arguments().listed("seeds", seeds, "leave seeds out for 0, 1, ...")
    return [Arguments().whole("seeds", seed, "pass whole numbers") for seed in listed]


Stack.__init__ = hinted(Stack.__init__)  # type: ignore[method-assign]
