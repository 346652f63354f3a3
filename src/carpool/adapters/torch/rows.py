"""The rows of a stack in the user's own loop: the user's objects go in, steps change the rows, objects get them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from carpool.adapters.torch import stack
from carpool.adapters.torch.absorb import absorb_into
from carpool.adapters.torch.hypers import mark_stepped
from carpool.adapters.torch.layout import make_layout
from carpool.adapters.torch.members import Members
from carpool.adapters.torch.template import leaves_of
from carpool.errors import ModelError, OptimizerError, sentence

Tensors = dict[str, Tensor]


class Rows:
    """The members' tensors, a row each: those that `stack.py` knows, and what a step of one's own reads."""

    def __init__(self, members: Members) -> None:
        self._members, self._built = members, members.built
        self.width = len(members.built)
        self.active = list(range(self.width))
        self._leaves = [list(leaves_of(built.model).values()) for built in self._built]
        self._versions = [_versions(leaves) for leaves in self._leaves]
        self._late: set[int] = set()
        self.lay(frozenset())

    def lay(self, idle: frozenset[str]) -> None:
        """Lays the members out, without the leaves that get no gradient, and writes them into the rows."""
        first, shared, device = self._built[0], self._members.shared, self._members.device
        self.layout = layout = make_layout(first, idle)
        made = stack.state_tensors(layout, first, self.width, 1, device, shared)
        made |= {f"shared:{n}": leaf.detach() for n, leaf in leaves_of(first.model).items() if n in shared}
        hypers = (self.width, len(layout.spans), layout.hypers)
        made |= {
            "active": torch.tensor([row in self.active for row in range(self.width)]),
            "k": torch.zeros((), dtype=torch.int64),
            "numbers": torch.zeros(hypers, dtype=torch.float64),
            "clip": torch.full((self.width,), torch.inf, dtype=self.wide),
            "losses": torch.zeros(self.width, dtype=torch.float64),
            "seeds": torch.tensor([built.seed for built in self._built]),
        }
        self.tensors = {name: tensor.to(device) for name, tensor in made.items()}
        self._numbers = np.full(hypers, np.nan)
        self.read(range(self.width))

    @property
    def wide(self) -> torch.dtype:
        """The type of losses and scalars."""
        return torch.float64 if self.layout.dtype == torch.float64 else torch.float32

    @property
    def state_names(self) -> list[str]:
        """The tensors that are what the members are."""
        return [name for name in self.tensors if stack.is_state(name)]

    def read(self, rows: Sequence[int]) -> None:
        """The user's objects into rows."""
        states = [stack.initial_states(self._built[row]) for row in rows]
        steps = self.tensors["steps"].clone()
        stack.write_rows(self.layout, self.tensors, rows, states)
        self.tensors["steps"].copy_(steps)  # what keys a member's random numbers goes on
        for row in rows:
            self._versions[row] = _versions(self._leaves[row])
        self._late -= set(rows)

    def stepped(self) -> None:
        """The active rows are ahead of the user's objects."""
        self._late |= set(self.active)
        for row in self.active:
            mark_stepped(self._optimizer(row))

    def write_back(self, rows: Sequence[int]) -> None:
        """Rows into the user's objects, where a step has changed them since."""
        late = [row for row in rows if row in self._late]
        if not late:
            return
        self.check_undisturbed(late)
        states = stack.read_rows(self.layout, self.tensors, late, [self._built[row] for row in late])
        for row, state in zip(late, states, strict=True):
            absorb_into(self._built[row], state)
            self._versions[row] = _versions(self._leaves[row])
        self._late -= set(late)

    def drop(self, row: int) -> None:
        """The row takes part in no more steps; its object holds what it is."""
        if row in self.active:
            self.write_back([row])
            self.active.remove(row)
            self.tensors["active"][row] = False

    def check_undisturbed(self, rows: Sequence[int]) -> None:
        """Raises where the user wrote into a model behind the stack's back."""
        for row in rows:
            if _versions(self._leaves[row]) != self._versions[row]:
                raise ModelError(
                    sentence(
                        f"the weights and buffers of model {row} to be changed by the stack only",
                        "others, written into the model itself",
                        f"take stack[{row}], change it, then call stack.load({row})",
                    )
                )

    def feed_hypers(self, clip_norm: float | None) -> None:
        """What the real optimizers say now: a scheduler may have stepped."""
        spans = self.layout.spans
        groups = [self._optimizer(row).param_groups for row in range(self.width)]
        for row, own in enumerate(groups):
            if len(own) != len(spans):
                raise _changed(row, f"{len(spans)} parameter groups", str(len(own)))
        now = np.array([[spans[0].update.numbers(group) for group in own] for own in groups])
        if not np.array_equal(now, self._numbers):
            self._check_arithmetic()
            self.tensors["numbers"].copy_(torch.from_numpy(now))
            self._numbers = now
        if clip_norm is not None:
            self.tensors["clip"].fill_(clip_norm)

    def _check_arithmetic(self) -> None:
        for row in range(self.width):
            groups = self._optimizer(row).param_groups
            for group, span in zip(groups, self.layout.spans, strict=True):
                was, now = dict(span.options), dict(span.update.structure(group))
                if was != now:
                    raise _changed(row, str(was), str(now))

    def _optimizer(self, row: int) -> Optimizer:
        (phase,) = self._built[row].phases
        return phase.optimizer


def _versions(leaves: Sequence[Tensor]) -> list[int]:
    """Torch's own counts of writes into each tensor."""
    return [leaf._version for leaf in leaves]


def _changed(row: int, expected: str, received: str) -> OptimizerError:
    return OptimizerError(
        sentence(
            f"optimizer {row} to keep what changes its arithmetic, {expected}",
            received,
            "make a new Stack after changing it",
        )
    )
