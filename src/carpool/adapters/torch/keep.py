"""Stacked models for a loop of the user's own: what `carpool.Stack` is for torch.

The stack holds the weights between steps (`rows.py`); what a step does is in `own_step.py`. A step is traced once for
each objective and batch shape, and an objective's first step is held against each member's step alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from carpool.adapters.torch.blame import blame
from carpool.adapters.torch.build import Arrays, in_precision
from carpool.adapters.torch.check import Case, Strict, solo_step, strict_step
from carpool.adapters.torch.compare import compare
from carpool.adapters.torch.inputs import read_inputs
from carpool.adapters.torch.members import Members, stepping
from carpool.adapters.torch.objective import Objective, read_objective
from carpool.adapters.torch.own_step import own_evaluate_step, own_predictions, own_train_step, prefixed
from carpool.adapters.torch.probe import Probe, probe
from carpool.adapters.torch.program import Program, flags
from carpool.adapters.torch.rows import Rows
from carpool.adapters.torch.signature import model_signature
from carpool.adapters.torch.stacked import PhaseRecipe, Recipe
from carpool.adapters.torch.template import modes_kept, template
from carpool.errors import CarpoolError, DataError, FusionError, OptionError, sentence

_MOST_PROGRAMS = 32  # a loss whose captured values change at every step must not pile up traces and batches
_MOST_CHECKED = 256


@dataclass(frozen=True)
class _Ready:
    """A traced step and the tensors through which it gets its batch."""

    program: Program
    data: tuple[Tensor, ...]

    def run(self, objective: Objective) -> None:
        for target, leaf in zip(self.data, objective.leaves, strict=True):
            target.copy_(leaf)
        self.program.run(1)


class Kept:
    """Members stacked on the device they are on."""

    def __init__(self, members: Members, compile: bool) -> None:
        self._members, self._compile = members, compile
        self._rows = Rows(members)
        self._bare = template(members.built[0].model)
        self._evaluating = copy.deepcopy(self._bare).eval()
        self._idle: frozenset[str] | None = None
        self._checked: set[Hashable] = set()
        self._programs: OrderedDict[Hashable, _Ready] = OrderedDict()

    def __len__(self) -> int:
        return self._rows.width

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(self._rows.active)

    def model(self, row: int) -> nn.Module:
        """The user's own module as the stack has it now."""
        self._rows.write_back([row])
        return self._members.built[row].model

    def sync(self) -> None:
        self._rows.write_back(range(len(self)))

    def load(self, row: int) -> None:
        self._rows.read([row])

    def drop(self, row: int) -> None:
        self._rows.drop(row)

    # Steps

    def step(
        self, arguments: Sequence[Any], step: Callable[..., Any] | None, each: bool, clip_norm: float | None
    ) -> Tensor:
        """One step of every active member; their losses."""
        if not self._rows.active:
            raise OptionError(sentence("an active member", "none: all were dropped", "end the loop"))
        objective = self._objective(arguments, step, each)
        if each and len(self._rows.active) < len(self):
            objective = self._without_dropped(objective)
        self._rows.check_undisturbed(self._rows.active)
        key = (objective.signature, str(objective.nest), clip_norm is not None)
        if key not in self._checked:
            self._settle(objective, each, clip_norm)
        ready = self._program("train", objective, each, clip_norm is not None)
        self._rows.feed_hypers(clip_norm)
        if key in self._checked:
            ready.run(objective)
        else:
            self._run_checked(ready, objective, each, clip_norm)
            self._checked.add(key)
        self._rows.stepped()
        return self._losses()

    def evaluate(self, arguments: Sequence[Any], step: Callable[..., Any] | None, each: bool) -> Tensor:
        """Every member's loss in evaluation mode."""
        objective = self._objective(arguments, step, each)
        self._program("evaluate", objective, each, False).run(objective)
        return self._losses()

    @torch.no_grad()
    def predict(self, value: Any, each: bool) -> Any:
        """Every member's outputs in evaluation mode, members first."""
        inputs = read_inputs(value).on(self._members.device)
        if each:
            self._check_each(inputs.tensors)
        return own_predictions(self._evaluating, self._rows.layout, self._rows.tensors, inputs, each)

    def _objective(self, arguments: Sequence[Any], step: Callable[..., Any] | None, each: bool) -> Objective:
        made = read_objective(arguments, step, self._members.device)
        if each:
            self._check_each(made.leaves)
        return made

    def _check_each(self, leaves: Sequence[Tensor]) -> None:
        wrong = next((leaf for leaf in leaves if leaf.shape[:1] != (len(self),)), None)
        if wrong is not None:
            raise DataError(
                sentence(
                    f"a first dimension of {len(self)}, one batch for each member",
                    f"shape {tuple(wrong.shape)}",
                    "stack the members' batches, or leave each=True out",
                )
            )

    def _without_dropped(self, objective: Objective) -> Objective:
        """A dropped row reads an active one's batch: its own may hold what would raise."""
        active = self._rows.active
        source = [row if row in active else active[0] for row in range(len(self))]
        return replace(objective, leaves=tuple(leaf[source] for leaf in objective.leaves))

    def _losses(self) -> Tensor:
        return self._rows.tensors["losses"].to(self._rows.wide, copy=True)

    # Making a step ready

    def _settle(self, objective: Objective, each: bool, clip_norm: float | None) -> None:
        """Probes a new objective: whether it can be stacked, and which parameters it reaches."""
        shown = self._probe(objective, each)
        reason = self._members.refusal(shown, clip_norm)
        if reason is None and self._idle is not None and self._idle != shown.idle:
            others = ", ".join(sorted(self._idle ^ shown.idle))
            reason = f"it reaches other parameters than the steps before it ({others})"
        if reason is not None:
            raise _refused(reason)
        if self._idle is None and shown.idle:
            self._rows.lay(shown.idle)
            self._programs.clear()
        self._idle = shown.idle

    def _probe(self, objective: Objective, each: bool) -> Probe:
        """A first dimension is added for the probe and taken away in the step, so that a batch may hold anything."""
        leaves = tuple(leaf[:1] if each else leaf[None] for leaf in objective.leaves)
        shared = self._members.shared

        def step(model: nn.Module, batch: Any, place: Any) -> dict[str, Tensor]:
            buffers = [(name, b, b._version) for name, b in model.named_buffers() if name in shared]
            values = objective.function(model, objective.batch([leaf[0] for leaf in batch]), place)
            written = next((name for name, buffer, version in buffers if buffer._version != version), None)
            if written is not None:
                raise _refused(f"its forward pass writes into {written!r}, which all members share")
            return values

        first = stepping(self._members.built[0], step, Arrays(leaves, None, flat=True))
        return probe(first, lambda built: model_signature(built.model))

    def _program(self, kind: str, objective: Objective, each: bool, clips: bool) -> _Ready:
        key = (kind, objective.signature, objective.shapes, each, clips)
        if (place := (key, flags())) not in self._programs:
            # Filled: compiling and capturing run the step on what is there, and random labels would raise.
            data = tuple(leaf.clone() for leaf in objective.leaves)
            tensors = self._rows.tensors | {f"data:{i}": leaf for i, leaf in enumerate(data)}
            make = own_train_step if kind == "train" else own_evaluate_step
            whole = ("own loop", self._members.signature, self._members.shared, self._idle, key)
            try:
                program = Program(make(self._recipe(objective, clips), each), [tensors], whole)
            except CarpoolError:
                raise
            except Exception as error:
                raise _refused(blame(error)) from error
            program.compile() if self._compile else program.stay_traced()
            self._programs[place] = _Ready(program, data)
        self._programs.move_to_end(place)
        while len(self._programs) > _MOST_PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[place]

    def _recipe(self, objective: Objective, clips: bool) -> Recipe:
        first = self._members.built[0].job
        function = in_precision(first, objective.function)
        return Recipe(
            layout=self._rows.layout,
            training=self._bare,
            evaluating=self._evaluating,
            phases=(PhaseRecipe(function, ("loss",), every=1),),
            evaluate=function,
            batch=objective.batch,
            validation_batch=objective.batch,
            evaluated=("loss",),
            clips=clips,
            accumulate=1,
            precision=first.precision,
        )

    # An objective's first step beside each member's own

    def _run_checked(self, ready: _Ready, objective: Objective, each: bool, clip_norm: float | None) -> None:
        built, tensors, names = self._members.built, self._rows.tensors, self._rows.state_names
        rows = self._rows.active[:: -(-len(self._rows.active) // _MOST_CHECKED)]
        recipe = self._recipe(objective, clip_norm is not None)
        before = {name: tensors[name].clone() for name in names}

        def case(row: int) -> Case:
            return self._case(row, objective, each, clip_norm, tensors | before)

        def strict(row: int) -> Strict:
            with self._training():
                return strict_step(recipe, case(row))

        with self._training():
            alone = {row: solo_step(recipe, case(row)) for row in rows}
        try:
            ready.run(objective)
            together = {name: tensors[name] for name in names} | {"sums": tensors["losses"][:, None]}
            for name, leaf in prefixed(tensors, "shared:").items():
                together[f"buffer:{name}"] = leaf.expand(len(self), *leaf.shape)
            check = compare(recipe, 1, alone, together, dict(enumerate(built)), strict, ready.program.lowest)
            if check.mismatch is not None:
                raise _refused(check.mismatch)
        except BaseException:  # who could not be compared has not stepped
            for name, tensor in before.items():
                tensors[name].copy_(tensor)
            raise

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Inside, the members' models are in the modes they were in when they were given."""
        with modes_kept([member.model for member in self._members.built]):
            for part, training in self._members.modes:
                part.training = training
            yield

    def _case(
        self,
        row: int,
        objective: Objective,
        each: bool,
        clip_norm: float | None,
        tensors: dict[str, Tensor],
    ) -> Case:
        member = self._members.built[row]
        own = {name: tensors[name][row].clone() for name in self._rows.state_names}
        own |= {f"fixed:{name}": leaf for name, leaf in prefixed(tensors, "shared:").items()}
        built = stepping(member, objective.function, Arrays(objective.leaves, objective.nest))
        built = replace(built, job=replace(member.job, clip_norm=clip_norm))
        data = [leaf[row] if each else leaf for leaf in objective.leaves]
        counts, step = tensors["updates"][row].cpu().numpy(), int(tensors["steps"][row])
        return Case(built, own, data, counts, step, place=0)


def _refused(reason: str) -> FusionError:
    return FusionError(sentence("a step that can be stacked", reason, "see docs/fusing.md"))
