"""One member's step as a function of its variables' values: what Keras' TorchTrainer does in `train_step` and `test_step`.

The values are written in place, as torch's optimizers do; the models' own variables are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras.src import tree
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from torch import Tensor

Values = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Of the trainable variables, the others, the optimizer's and the metrics'."""
Step = Callable[[Values, Any], Tensor]


def variables(model: Any) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(model.optimizer.variables),
        list(model.metrics_variables),
    )


def train_step(model: Any, used: Sequence[bool]) -> Step:
    """A training step; answers its loss. `used` says which trainable variables the loss depends on (`depended`)."""

    def step(values: Values, batch: Any) -> Tensor:
        trainable, others, optimizer, metrics = values
        x, y, sample_weight = unpack_x_y_sample_weight(batch)

        def objective(weights: list[Tensor]) -> Any:
            return _forward(
                model, (weights, others, optimizer, metrics), (x, y, sample_weight), training=True
            )

        if any(used):
            gradients, (loss, y_pred, new_others, new_metrics) = torch.func.grad(objective, has_aux=True)(
                trainable
            )
        else:
            _, (loss, y_pred, new_others, new_metrics) = objective(trainable)
            gradients = []
        _write(others, new_others)
        _write(metrics, new_metrics)
        if any(used):
            given = [g if is_used else None for g, is_used in zip(gradients, used, strict=True)]
            _apply(model, (trainable, others, optimizer, metrics), given)
        _show(model, metrics, loss, x, y, y_pred, sample_weight)
        return loss

    return step


def test_step(model: Any) -> Step:
    def step(values: Values, batch: Any) -> Tensor:
        _, others, _, metrics = values
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        _, (loss, y_pred, new_others, new_metrics) = _forward(
            model, values, (x, y, sample_weight), training=False
        )
        _write(others, new_others)
        _write(metrics, new_metrics)
        _show(model, metrics, loss, x, y, y_pred, sample_weight)
        return loss

    return step


def results(model: Any) -> Callable[[list[Tensor]], dict[str, Any]]:
    """What the metrics say, as a function of their variables' values."""

    def read(metrics: list[Tensor]) -> dict[str, Any]:
        mapping = list(zip(model.metrics_variables, metrics, strict=True))
        with StatelessScope(state_mapping=mapping, initialize_variables=False):
            return model.get_metrics_result()

    return read


def depended(model: Any, values: Values, batch: Any) -> tuple[bool, ...]:
    """Which trainable variables the loss depends on: Keras updates no others."""
    leaves = [value.detach().requires_grad_() for value in values[0]]
    loss, _ = _forward(model, (leaves, *values[1:]), unpack_x_y_sample_weight(batch), training=True)
    if not leaves or not loss.requires_grad:
        return tuple(False for _ in leaves)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return tuple(gradient is not None for gradient in gradients)


def starting_metrics(model: Any) -> list[Tensor]:
    """What the metrics' variables hold after `reset_metrics`, which touches no variable here."""
    held = model.metrics_variables
    mapping = [(variable, variable.value) for variable in held]
    with StatelessScope(state_mapping=mapping, initialize_variables=False) as scope:
        model.reset_metrics()
    now: list[Any] = [scope.get_current_value(variable) for variable in held]
    return [value.detach().clone() for value in now]


def _forward(model: Any, values: Values, batch: Any, training: bool) -> Any:
    """The loss to take gradients of, and the loss itself, the predictions and the values that the call changed."""
    trainable, others, optimizer, metrics = values
    x, y, sample_weight = batch
    options = {"training": training} if model._call_has_training_arg else {}
    y_pred, others, losses = model.stateless_call(trainable, others, x, return_losses=True, **options)
    if losses:
        model._losses_override.clear()
        model._losses_override = losses
    try:
        loss, (_, others, metrics) = model.stateless_compute_loss(
            trainable,
            others,
            metrics,
            x=x,
            y=y,
            y_pred=y_pred,
            sample_weight=sample_weight,
            training=training,
        )
    finally:
        model._losses_override.clear()
    scaled = loss
    if training:
        mapping = list(zip(model.optimizer.variables, optimizer, strict=True))
        with StatelessScope(state_mapping=mapping, initialize_variables=False):
            scaled = model.optimizer.scale_loss(loss)
    return scaled, (loss, y_pred, others, metrics)


def _apply(model: Any, values: Values, gradients: Sequence[Tensor | None]) -> None:
    parts = variables(model)
    mapping = [pair for place in (0, 2) for pair in zip(parts[place], values[place], strict=True)]
    with StatelessScope(state_mapping=mapping, initialize_variables=False) as scope, torch.no_grad():
        model.optimizer.apply(list(gradients), parts[0])
    for place in (0, 2):
        _write(values[place], [scope.get_current_value(variable) for variable in parts[place]])


def _show(
    model: Any, metrics: list[Tensor], loss: Tensor, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> None:
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with StatelessScope(state_mapping=mapping, initialize_variables=False) as scope, torch.no_grad():
        size = next(leaf for leaf in tree.flatten(x) if leaf is not None).shape[0]
        model._loss_tracker.update_state(loss, sample_weight=size)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    _write(metrics, [scope.get_current_value(variable) for variable in model.metrics_variables])


def _write(values: Sequence[Tensor], new: Sequence[Tensor | None]) -> None:
    """What was not written in place already."""
    with torch.no_grad():
        for value, now in zip(values, new, strict=True):
            if now is not None and now is not value:
                value.copy_(now)
