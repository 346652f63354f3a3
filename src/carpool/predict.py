"""Predictions of many models at once, in the shape in which the models came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from carpool import adapters
from carpool.adapters.base import Adapter
from carpool.arguments import MOST, Arguments
from carpool.errors import DeviceError, ModelError, described, sentence, shown
from carpool.result import Results


@overload
def predict(
    models: Mapping[str, Any] | Results, inputs: Any, *, batch_size: int | None = None, device: str = "auto"
) -> dict[str, Any]: ...
@overload
def predict(
    models: list[Any] | tuple[Any, ...],
    inputs: Any,
    *,
    batch_size: int | None = None,
    device: str = "auto",
) -> list[Any]: ...
def predict(
    models: Mapping[str, Any] | Results | list[Any] | tuple[Any, ...],
    inputs: Any,
    *,
    batch_size: int | None = None,
    device: str = "auto",
) -> dict[str, Any] | list[Any]:
    """What each model predicts for the same inputs: a list for a list, a dict by name for a mapping or `Results`.

    Models of one structure run in one launch a batch; the weights they share (a frozen trunk) are used once. Others run
    one after another. All run in evaluation mode without gradients, and are afterwards as they were. `inputs` is an
    array, a tuple of several positional arguments, or a dict of keywords; for a model that takes a dict, pass `({...},)`.
    `batch_size` bounds the memory of a forward pass. Outputs are tensors on the device of the inputs. On a CPU long calls
    run as machine code where that is faster, on batches of its own where each sample's outputs are made of that sample alone.

    >>> import torch, carpool
    >>> models = {"a": torch.nn.Linear(4, 2), "b": torch.nn.Linear(4, 2)}
    >>> outputs = carpool.predict(models, torch.randn(8, 4), batch_size=3, device="cpu")
    >>> {name: tuple(output.shape) for name, output in outputs.items()}
    {'a': (8, 2), 'b': (8, 2)}
    """
    names, listed = _listed(models)
    if batch_size is not None:
        batch_size = Arguments().whole("a batch_size", batch_size, "leave it out for one batch", 1, MOST)
    if not isinstance(device, str):
        raise DeviceError(sentence("a device's name as text", shown(device), 'pass device="auto"'))
    by_kind: dict[type[Adapter], list[int]] = {}
    for position, model in enumerate(listed):
        by_kind.setdefault(adapters.claiming(model), []).append(position)
    outputs: dict[int, Any] = {}
    for kind, positions in by_kind.items():
        made = kind().predict([listed[i] for i in positions], inputs, batch_size, device)
        outputs |= dict(zip(positions, made, strict=True))
    in_order = [outputs[position] for position in range(len(listed))]
    return in_order if names is None else dict(zip(names, in_order, strict=True))


def _listed(models: Any) -> tuple[list[str] | None, list[Any]]:
    """The names, where models come by name, and the models."""
    if isinstance(models, Results):
        models = {result.name: _model(result) for result in models}
    if isinstance(models, Mapping):
        names, listed = list(models), list(models.values())
    elif isinstance(models, list | tuple):
        names, listed = None, list(models)
    else:
        raise ModelError(
            sentence(
                "a list of models, a dict of them by name, or Results",
                type(models).__name__,
                "pass [model] for one model",
            )
        )
    if not listed:
        raise ModelError(sentence("at least one model", "none", "pass a list of models"))
    return names, listed


def _model(result: Any) -> Any:
    if result.model is None:
        why = f" ({described(result.error)})" if result.error is not None else ""
        raise ModelError(
            sentence(
                "every result to have a model",
                f"none in {result.name!r}, which {result.outcome.value}{why}",
                "pass {r.name: r.model for r in results if r.model is not None}",
            )
        )
    return result.model
