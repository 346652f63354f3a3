"""Fusing torch jobs: when they can be stacked, and opening the stack."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from carpool import machine, recall
from carpool.adapters.base import Fuser, Prepared
from carpool.adapters.torch import stack
from carpool.adapters.torch.blame import blame
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.faking import faked
from carpool.adapters.torch.footprint import peak_bytes
from carpool.adapters.torch.fused import StackedSession, make_window
from carpool.adapters.torch.layout import make_layout
from carpool.adapters.torch.pace import pace_key
from carpool.adapters.torch.panels import Panels, panels_of
from carpool.adapters.torch.probe import Probe
from carpool.adapters.torch.program import Tensors, flags, trace_only
from carpool.adapters.torch.resident import Code, code_of
from carpool.adapters.torch.rowwise import is_apart
from carpool.adapters.torch.sharing import reads_alike, shared_leaves
from carpool.adapters.torch.stacked import PhaseRecipe, Recipe, train_step
from carpool.adapters.torch.store import Pool, Store
from carpool.adapters.torch.streams import Streamed
from carpool.adapters.torch.template import template
from carpool.adapters.torch.threads import Threads, chosen, chosen_of
from carpool.adapters.torch.window import Window
from carpool.ambient import Ambient
from carpool.errors import failure
from carpool.job import Job
from carpool.kernels.convolve import gains
from carpool.kernels.resident.builder import Refused
from carpool.kernels.updates import UNFUSED, UPDATES
from carpool.memory.estimate import Footprint
from carpool.planning.cursor import Course, Cursor, cut
from carpool.planning.spec import Signature
from carpool.planning.trials import Trial


@dataclass(frozen=True)
class Known:
    """What the adapter knows of a job it has described."""

    built: Built
    probe: Probe
    signature: Signature
    course: Course


_QUICK_FLOPS = (
    10e6  # of a step: a core takes 0.3 ms for them, as long as it takes to begin an eager step's operators
)
_LONG_ALONE = 1000  # steps
_LONG_LAUNCHES = 200  # from here on machine code, made in some 0.2 s, is expected to pay
_WASTE = 1.05  # allocators round sizes up
_WORKSPACE_BYTES = 32 << 20  # what cuBLAS and cuDNN keep for a stream


class TorchFuser(Fuser):
    """Stacks jobs of one signature."""

    def __init__(
        self, known: Callable[[Job], Known], store: Store, device: Callable[[], str], compile: str | bool
    ) -> None:
        self._known = known
        self._store = store
        self._device = device
        self._compile = compile
        self._unturned: set[Signature] = set()
        self._refused: dict[Hashable, str] = {}
        self._last: _Asked | None = None

    def refusal(self, jobs: Sequence[Job]) -> str | None:
        known = [self._known(job) for job in jobs]
        return untraced_refusal(known) or self._step_refusal(known)

    def _step_refusal(self, known: Sequence[Known]) -> str | None:
        """Why their step cannot be taken together. Where it may be machine code, making it begins, and nothing else is traced."""
        code = self._code(known) if self._may_be_code(known) else ""
        if isinstance(code, Code):
            machine.begin(code.source)
            return None
        if code and self._compile == "resident":
            return self._trace_refusal(known) or f"its steps cannot be machine code: {code}"
        return self._trace_refusal(known)

    def outlook(self, jobs: Sequence[Job]) -> str:
        """Whether their steps can be machine code, where that is worth saying."""
        known = [self._known(job) for job in jobs]
        if not self._may_be_code(known):
            return ""
        code = self._code(known)
        if isinstance(code, str):
            return f"not as machine code: {code}"
        found = recall.remembered(pace_key(known[0], len(known), self._device()))
        is_open = self._compile == "auto" and (found is None or found.form != "resident")
        return "as machine code, where that is faster" if is_open else "as machine code"

    def code(self, jobs: Sequence[Job]) -> str:
        """The C of a training step of theirs; where there is none, a comment that says why."""
        made = self._shown([self._known(job) for job in jobs])
        if isinstance(made, Code):
            return f"/* one member's training step, on a batch of {made.size} */\n{made.source}"
        return f"/* none: {made.replace('*/', '* /')} */"

    def _shown(self, known: Sequence[Known]) -> Code | str:
        if (device := self._device()) != "cpu":
            return f"steps on {device} are not machine code"
        if isinstance(known[0].built.data, Streamed):
            return "batches of a stream do not lie where machine code could gather them"
        return self._lowered(known)

    def _may_be_code(self, known: Sequence[Known]) -> bool:
        """Whether a run is on a CPU and so long that machine code may pay."""
        first = known[0]
        if self._compile not in ("auto", "resident") or self._device() != "cpu":
            return False
        if isinstance(first.built.data, Streamed) or untraced_refusal(known[:1]) is not None:
            return False
        return self._compile == "resident" or first.course.steps >= _LONG_LAUNCHES

    def is_quick_alone(self, job: Job, alike: int) -> bool:
        """Whether a job alone takes its steps as machine code: one core is through before an operator would have begun."""
        known = [self._known(job)]
        if not self._may_be_code(known):
            return False
        code = self._code(known)
        if isinstance(code, str) or self._compile == "resident":
            return not isinstance(code, str)
        return code.flops <= _QUICK_FLOPS and known[0].course.steps * alike >= _LONG_ALONE

    def _code(self, known: Sequence[Known]) -> Code | str:
        """The machine code of a training step, or why there is none."""
        return machine.unavailable() or self._lowered(known)

    def _lowered(self, known: Sequence[Known]) -> Code | str:
        """The same where nothing could compile it."""
        asked = self._asked(known, len(known))
        if asked.code is None:
            asked.code = self._lowered_once(known)
        return asked.code

    def _lowered_once(self, known: Sequence[Known]) -> Code | str:
        first, width = known[0], len(known)
        try:
            recipe = self._recipe(known, width)
            tensors = self._part(known, width, panels_of(first, recipe, width, self._device()))
            return code_of("train", (first.signature, recipe.sharing), recipe, _batch_size(first), tensors)
        except Refused as refused:
            return str(refused)
        except BaseException as error:
            failure(error)
            return blame(error)

    def _trace_refusal(self, known: Sequence[Known]) -> str | None:
        """Traces the step at the width it would run at; the trace is remembered for `open`, and so is what it raises for jobs alike."""
        key = (known[0].signature, self._recipe(known, len(known)).sharing, len(known), _batch_size(known[0]))
        if key not in self._refused:
            try:
                self._traced(known, len(known))
            except BaseException as error:
                failure(error)
                self._refused[key] = blame(error)
        return self._refused.get(key)

    def _recipe(self, known: Sequence[Known], width: int) -> Recipe:
        """Of the members asked about last it is remembered: looking through thousands takes a while."""
        return self._asked(known, width).recipe

    def _asked(self, known: Sequence[Known], width: int) -> _Asked:
        turns = known[0].signature not in self._unturned
        last = self._last
        if last is None or (last.width, last.turns) != (width, turns) or not _are_same(last.known, known):
            recipe = make_recipe(known, width, self._device(), turns)
            last = self._last = _Asked(known, width, turns, recipe)
        return last

    def _traced(
        self, known: Sequence[Known], width: int, panels: Panels | None = None
    ) -> tuple[GraphModule, Tensors]:
        """The step of a panel of these members in a stack of so many rows, and tensors of its shapes that hold nothing."""
        try:
            return self._traced_once(known, width, panels)
        except BaseException as error:
            failure(error)
            if not self._recipe(known, width).innermost:
                raise
            self._unturned.add(known[0].signature)  # `view`, say, wants channels where they were
            return self._traced_once(known, width, panels)

    def _traced_once(
        self, known: Sequence[Known], width: int, panels: Panels | None
    ) -> tuple[GraphModule, Tensors]:
        first, size = known[0], _batch_size(known[0])
        recipe = self._recipe(known, width)
        part = self._part(known, width, panels or panels_of(first, recipe, width, self._device()))
        key = ("train", (first.signature, recipe.sharing), size)
        return trace_only(train_step(recipe, size), part, key), part

    def _part(self, known: Sequence[Known], width: int, panels: Panels) -> Tensors:
        """Tensors of the shapes of a panel's step that hold nothing; remembered, as making them takes a while."""
        first, device, asked = known[0], self._device(), self._asked(known, width)
        sharing = asked.recipe.sharing
        key = (first.signature, sharing, panels, device, asked.shapes, asked.longest, flags())
        part = _empty.pop(key, None) or _empty_part(first, asked, panels, device)
        if not asked.recipe.shared:  # nothing is kept of tensors that are the user's own
            _empty[key] = part
        while len(_empty) > _REMEMBERED:
            _empty.popitem(last=False)
        return part

    def footprint(self, jobs: Sequence[Job]) -> Footprint | None:
        """By the step at two widths, on tensors that hold nothing."""
        known = [self._known(job) for job in jobs]
        if untraced_refusal(known) is not None:
            return None
        try:
            one, _ = self._peak(known, 1)
            two, checked = self._peak(known, 2)
        except BaseException as error:  # what cannot be traced is told by `refusal`, and runs as it is
            failure(error)
            return None
        beside = _WORKSPACE_BYTES if self._device().startswith("cuda") else 0
        return Footprint(int(_WASTE * max(0, 2 * one - two)) + beside, int(_WASTE * (two - one)), checked)

    def _peak(self, known: Sequence[Known], width: int) -> tuple[int, int]:
        """The most that is alive in a step, and what checking one of the members takes."""
        traced, tensors = self._traced(known, width, Panels(1, width))
        with faked():
            empty = [torch.empty_like(tensor) for tensor in tensors.values()]
            return peak_bytes(traced, empty), stack.checked_bytes(tensors)

    def tried(self, jobs: Sequence[Job], measure: bool = False) -> Trial | None:
        known = [self._known(job) for job in jobs]
        found = recall.remembered(pace_key(known[0], len(known), self._device()))
        if found is not None or not measure or isinstance(known[0].built.data, Streamed):
            return found  # a stream's batches would be gone
        try:
            with Ambient(known[0].built.job.seed).inside():
                return self._tried(jobs, known)
        except BaseException as error:  # what raises here raises again in training, and is told there
            failure(error)
            return None

    def _tried(self, jobs: Sequence[Job], known: Sequence[Known]) -> Trial | None:
        """The trial that training would make before its first step, in a stack that is thrown away."""
        supplies = {row: member.course.supply(0) for row, member in enumerate(known)}
        chunk = cut(supplies, dict.fromkeys(supplies, Cursor()), max_steps=1)
        if chunk is None:
            return None
        session = self.open(jobs, len(jobs), self._device())
        try:
            with session.turn():
                return session.trial(chunk)
        finally:
            session.close()

    def open(
        self, jobs: Sequence[Job], width: int, device: str, prepared: Prepared = lambda *_: None
    ) -> StackedSession:
        return self._opened(jobs, width, device, prepared)

    def open_alone(self, job: Job, device: str, stacks: int) -> StackedSession:
        """A stack of one job, of so many that run the same steps."""
        return self._opened([job], 1, device, stacks=stacks)

    def _opened(
        self,
        jobs: Sequence[Job],
        width: int,
        device: str,
        prepared: Prepared = lambda *_: None,
        stacks: int = 1,
    ) -> StackedSession:
        known = [self._known(job) for job in jobs]
        # At this width nobody may have looked whether the model minds channels innermost.
        if self._recipe(known, width).innermost:
            try:
                self._traced(known, width)
            except BaseException as error:  # what cannot be traced either way is told at the first step
                failure(error)
        threads = self._threads(known, width)
        return StackedSession(
            self._recipe(known, width),
            known,
            width,
            device,
            self._store,
            self._compile,
            prepared,
            self._known,
            stacks,
            threads,
        )

    def _threads(self, known: Sequence[Known], width: int) -> Threads:
        """The threads that a stack steps with on a CPU."""
        most = torch.get_num_threads()
        if self._device() != "cpu" or most == 1:
            return Threads()
        try:
            code = self._code(known) if self._may_be_code(known) else ""
            if isinstance(code, Code):
                return chosen_of(code, width, most)
            traced, tensors = self._traced(known, width)
            return chosen(traced, most, len(tensors["weights"]))
        except Exception:  # what cannot be traced is told at the first step
            return Threads()


@dataclass(eq=False)
class _Asked:
    """Members that somebody asked about, in a stack of so many rows, and what was found out about them."""

    known: Sequence[Known]
    width: int
    turns: bool
    recipe: Recipe
    code: Code | str | None = None
    """The machine code of a training step, or why there is none, once somebody asked."""

    @cached_property
    def _held(self) -> Window | Pool:
        return make_window(self.known) or Pool([member.built.data for member in self.known])

    @cached_property
    def shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Of the arrays that they read."""
        return tuple(self._held.shapes())

    @cached_property
    def longest(self) -> int:
        """The length of the longest order in which they read them."""
        if isinstance(self._held, Window):
            return self._held.length
        return max(member.course.length for member in self.known)


_REMEMBERED = 128
_empty: OrderedDict[Hashable, Tensors] = OrderedDict()
"""Tensors that hold nothing, of the shapes that a panel's step has, in this process."""


def _empty_part(first: Known, asked: _Asked, panels: Panels, device: str) -> Tensors:
    """The tensors of a panel's step, without contents."""
    recipe, values = asked.recipe, len(asked.recipe.values)
    with faked():
        tensors = stack.state_tensors(recipe.layout, first.built, panels.width, values, device, recipe.shared)
        tensors |= stack.shared_tensors(first.built, recipe.shared, torch.empty_like, device)
        tensors |= stack.feed_tensors(recipe.layout, first.built, panels, values, device)
        tensors |= stack.empty_data(asked.shapes, panels.width, asked.longest, device)
        return panels.cut(tensors)[0]


def _are_same(some: Sequence[Known], others: Sequence[Known]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _batch_size(known: Known) -> int:
    return min(known.course.batch_size, known.built.data.length)


def untraced_refusal(known: Sequence[Known]) -> str | None:
    """Why these members of one signature cannot be stacked, as far as it shows before a step is traced."""
    first = known[0]
    reason = (
        _stream_refusal(first)
        or first.probe.failure
        or _reach_refusal(first)
        or _phases_refusal(first)
        or _parameter_refusal(first)
    )
    for member in known:
        reason = reason or _state_refusal(member)
    return reason


def make_recipe(members: Sequence[Known], width: int, device: str, turns: bool = True) -> Recipe:
    """The recipe of a structure, in a stack of so many rows, with templates of its model that hold no memory of their own.

    `turns`: its tensors may be laid out anew.
    """
    known = members[0]
    bare = template(known.built.model)
    rows, shared, alike = max(width, len(members)), shared_leaves(members), reads_alike(members)
    once = bool(shared) and alike  # a trunk, say, that is computed once for all members; not one by one
    apart = is_apart(rows, known.probe.convolved > 0 and not once, device)
    shapes = [parameter.shape for parameter in known.built.model.parameters()]
    return Recipe(
        layout=make_layout(known.built, known.probe.idle),
        training=bare,
        evaluating=copy.deepcopy(bare).eval(),
        phases=tuple(
            PhaseRecipe(phase.step, values, phase.every)
            for phase, values in zip(known.built.phases, known.probe.values, strict=True)
        ),
        evaluate=known.built.evaluate,
        batch=known.built.data.batch,
        validation_batch=(known.built.validation or known.built.data).batch,
        evaluated=known.probe.evaluated,
        clips=known.built.job.clip_norm is not None,
        accumulate=known.built.job.accumulate,
        precision=known.built.job.precision,
        shared=shared,
        alike=alike,
        apart=apart,
        innermost=apart and turns and gains(shapes),
    )


def _stream_refusal(known: Known) -> str | None:
    data = known.built.data
    return f"its batches hold {data.foreign}" if isinstance(data, Streamed) and data.foreign else None


def _reach_refusal(known: Known) -> str | None:
    """What the backward pass of a step without contents raises, or None."""
    try:
        known.probe.idle  # noqa: B018  # computed when it is first asked for
    except BaseException as error:
        failure(error)
        return blame(error)
    return None


def _phases_refusal(known: Known) -> str | None:
    """A phase whose optimizer has no stacked form or trains nothing, or a parameter that two phases hold."""
    names = {id(p): name for name, p in known.built.model.named_parameters()}
    holders: dict[str, str] = {}
    for phase in known.built.phases:
        if (refusal := _optimizer_refusal(phase.optimizer)) is not None:
            return refusal
        own = [names[id(p)] for p in phase.trained]
        if phase.name and not set(own) - known.probe.idle:
            return f"phase {phase.name!r} trains no parameter"
        for name in own:
            if (other := holders.setdefault(name, phase.name)) != phase.name:
                return f"{name!r} is held by two phases, {other!r} and {phase.name!r}"
    return None


def _optimizer_refusal(optimizer: Optimizer) -> str | None:
    kind = type(optimizer)
    if kind not in UPDATES:
        why = UNFUSED.get(kind, "carpool.kernels.updates.register gives it one")
        return f"{kind.__module__}.{kind.__qualname__} has no stacked update ({why})"
    hooks = [name for name in vars(optimizer) if name.endswith("_hooks") and getattr(optimizer, name)]
    if hooks:
        return f"the optimizer has {hooks[0].strip('_').replace('_', ' ')}"
    refusals = (UPDATES[kind].refusal(group) for group in optimizer.param_groups)
    return next((refusal for refusal in refusals if refusal), None)


def _parameter_refusal(known: Known) -> str | None:
    built = known.built
    held = {id(p) for phase in built.phases for p in phase.trained}
    learning = {
        name: p
        for name, p in built.model.named_parameters()
        if p.requires_grad and name not in known.probe.idle
    }
    updated = {name: p for name, p in learning.items() if id(p) in held}
    if not updated:
        return "no parameter is trained"
    if len({p.dtype for p in updated.values()}) > 1:
        return "its trained parameters have several dtypes"
    hooked = next((name for name, p in built.model.named_parameters() if _has_hooks(p)), None)
    if hooked:
        return f"{hooked!r} has a gradient hook"
    overlapping = _sharing_memory(built.model)
    if overlapping:
        return f"{overlapping[0]!r} and {overlapping[1]!r} are two tensors in one memory"
    outside = next((name for name in learning if name not in updated), None)
    if outside and built.job.clip_norm is not None and built.job.phases is None:
        return f"clip_norm counts the gradient of {outside!r}, which the optimizer does not hold"
    sparse = [name for name, m in built.model.named_modules() if getattr(m, "sparse", False)]
    return f"{sparse[0]!r} has sparse gradients" if sparse else None


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _sharing_memory(model: nn.Module) -> tuple[str, str] | None:
    """Two parameters or buffers that are not one object but lie in one memory: a stack would give each its own."""
    owners: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        other = owners.setdefault(tensor.untyped_storage().data_ptr(), name) if tensor.numel() else name
        if other != name:
            return other, name
    return None


def _state_refusal(known: Known) -> str | None:
    if not any(phase.optimizer.state for phase in known.built.phases):
        return None
    layout = make_layout(known.built, known.probe.idle)
    try:
        state = stack.initial_states(known.built)
        stack.updates_done(layout, state)
        stack.tallied(layout, state)
    except ValueError as error:
        return f"{known.built.job.name!r}: {error}"
    return None
