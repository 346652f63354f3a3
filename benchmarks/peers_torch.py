"""What people do without carpool, from seeds to trained weights: a plain loop, torch.func's vmap, and processes.

Every way follows loss and accuracy, as carpool does. Only the plain loop (here and in the processes) reads its batches in
carpool's order, so that its weights can be compared; vmap shuffles with torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.multiprocessing import get_context

import carpool
from benchmarks.precision import computing_in
from benchmarks.workloads import WORKLOADS, Data, Member, Workload, accuracy, loss

Leaves = dict[str, Tensor]


def seeded(workload: Workload, member: Member) -> nn.Module:
    """The member's model before its first step."""
    torch.manual_seed(member.seed)
    return workload.make()


def train_alone(workload: Workload, member: Member, data: Data, epochs: int) -> nn.Module:
    """One model in a plain eager loop."""
    model = seeded(workload, member).to(data.x.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=member.lr)
    for epoch in range(epochs):
        order = torch.from_numpy(carpool.batch_order(member.seed, epoch, len(data.x))).to(data.x.device)
        shown = torch.zeros(2, device=data.x.device)
        for rows in order.split(workload.batch_size):
            shown += eager_step(model, optimizer, data.x[rows], data.y[rows], workload.precision)
    return model


def eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, precision: str
) -> Tensor:
    """One training step; its loss and accuracy."""
    optimizer.zero_grad()
    with computing_in(precision, x.device.type):
        prediction = model(x)
        value = loss(prediction, y)
    value.backward()
    optimizer.step()
    return torch.stack([value.detach(), accuracy(prediction.detach(), y)])


def train_in_turn(workload: Workload, members: Sequence[Member], data: Data, epochs: int) -> list[nn.Module]:
    """One model after the other."""
    return [train_alone(workload, member, data, epochs) for member in members]


# torch.func


def train_vmapped(workload: Workload, members: Sequence[Member], data: Data, epochs: int) -> Leaves:
    """All members through vmap(grad), as PyTorch's tutorial on model ensembling stacks them, with Adam by hand."""
    stack = Stacked(workload, members, str(data.x.device))
    for _ in range(epochs):
        order = torch.rand(len(members), len(data.x), device=data.x.device).argsort(1)
        shown = torch.zeros(len(members), 2, device=data.x.device)
        for rows in order.split(workload.batch_size, dim=1):
            shown += stack.step(data.x[rows], data.y[rows])
    return stack.weights


class Stacked:
    """The members' weights and buffers in one stack, which a step changes in place."""

    def __init__(self, workload: Workload, members: Sequence[Member], device: str) -> None:
        models = [seeded(workload, member) for member in members]
        weights, buffers = stack_module_state(models)
        self.weights = {name: leaf.detach().to(device, copy=True) for name, leaf in weights.items()}
        self.buffers = {name: leaf.detach().to(device, copy=True) for name, leaf in buffers.items()}
        self._adam = Adam(self.weights, members)
        self._gradients = vmap(grad(_objective(workload, models[0]), has_aux=True))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of all members; their losses and accuracies."""
        grads, (shown, moved) = self._gradients(self.weights, self.buffers, x, y)
        self._adam.step(grads)
        for name, buffer in self.buffers.items():
            buffer.copy_(moved[name])
        return shown


def _objective(workload: Workload, model: nn.Module) -> Callable[..., tuple[Tensor, tuple[Tensor, Leaves]]]:
    template = copy.deepcopy(model).to("meta")

    def objective(own: Leaves, buffers: Leaves, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Leaves]]:
        moved = {
            name: buffer.clone() for name, buffer in buffers.items()
        }  # the forward pass writes into them
        with computing_in(workload.precision, x.device.type):
            prediction = functional_call(template, {**own, **moved}, (x,))
            value = loss(prediction, y)
        return value, (torch.stack([value.detach(), accuracy(prediction.detach(), y)]), moved)

    return objective


class Adam:
    """Adam on a stack, a learning rate for each member. Everything is on the device: a graph can capture it."""

    def __init__(self, weights: Leaves, members: Sequence[Member]) -> None:
        some = next(iter(weights.values()))
        self._weights = weights
        self._means = {name: torch.zeros_like(leaf) for name, leaf in weights.items()}
        self._squares = {name: torch.zeros_like(leaf) for name, leaf in weights.items()}
        self._lr = torch.tensor([member.lr for member in members], device=some.device)
        self._count = torch.zeros((), device=some.device)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Updates the weights in place."""
        self._count.add_(1)
        mean_share, square_share = 1 - 0.9**self._count, 1 - 0.999**self._count
        for name, weight in self._weights.items():
            mean, square = self._means[name], self._squares[name]
            mean.lerp_(grads[name], 0.1)
            square.mul_(0.999).addcmul_(grads[name], grads[name], value=0.001)
            lr = self._lr.view(-1, *(1,) * (weight.dim() - 1))
            weight.sub_(lr * (mean / mean_share) / ((square / square_share).sqrt() + 1e-8))


# Processes


class Workers:
    """A pool of processes, each training whole models in the plain loop. Starting them is not part of any window."""

    def __init__(self, count: int) -> None:
        self.count = count
        context = get_context("spawn")
        threads = max(1, torch.get_num_threads() // count)
        self._pool = context.Pool(count, initializer=_start, initargs=(threads, context.Barrier(count)))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.terminate()
        self._pool.join()

    def warm_up(self, workload: Workload, members: Sequence[Member]) -> None:
        """Every worker trains a model for an epoch, so that none is still starting when a window does."""
        tasks = [(workload.name, members[0], 1)] * self.count
        self._pool.starmap(_warm_task, tasks, chunksize=1)

    def train(
        self, workload: Workload, members: Sequence[Member], epochs: int
    ) -> list[dict[str, np.ndarray]]:
        """One task a model; the trained weights come back."""
        tasks = [(workload.name, member, epochs) for member in members]
        return self._pool.starmap(_train_task, tasks, chunksize=1)


_all_started: list[Barrier] = []  # a worker's own; a pool has no other way to hand it over


def _start(threads: int, barrier: Barrier) -> None:
    torch.set_num_threads(threads)
    _all_started.append(barrier)


def _warm_task(name: str, member: Member, epochs: int) -> None:
    _all_started[0].wait(timeout=120)  # who waits here takes no second task: each worker gets one
    _train_task(name, member, epochs)


def _train_task(name: str, member: Member, epochs: int) -> dict[str, np.ndarray]:
    workload = WORKLOADS[name]
    model = train_alone(workload, member, workload.data(), epochs)
    return {key: leaf.numpy() for key, leaf in model.state_dict().items()}
