"""The torch adapter: claims modules, describes jobs, opens sessions, writes results back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from carpool import ambient
from carpool.adapters.base import Adapter, JobState, Session, Trained
from carpool.adapters.place import Place
from carpool.adapters.torch import full, lightning, saved
from carpool.adapters.torch.absorb import absorb_into, on_host
from carpool.adapters.torch.behaviour import behaviour, job_signature
from carpool.adapters.torch.build import Arrays, Built, LivePhase, build_data, build_model, model_or_factory
from carpool.adapters.torch.fuse import Known, TorchFuser
from carpool.adapters.torch.hold import hold_of
from carpool.adapters.torch.keep import Kept
from carpool.adapters.torch.members import make_members
from carpool.adapters.torch.partition import is_kept
from carpool.adapters.torch.phases import build_phases, evaluation
from carpool.adapters.torch.predict import predict
from carpool.adapters.torch.probe import Probe, probe, remember, remembered, seen_on
from carpool.adapters.torch.program import end_run, flags
from carpool.adapters.torch.solo import SoloSession
from carpool.adapters.torch.stack import initial_states
from carpool.adapters.torch.store import Store, key_of
from carpool.adapters.torch.streams import Streamed, Streams, is_stream
from carpool.adapters.torch.work import busy
from carpool.arrays import Array
from carpool.errors import DeviceError, ModelError, sentence
from carpool.job import Job
from carpool.kernels.updates import UPDATES
from carpool.memory import heap
from carpool.memory.size import size
from carpool.planning.cursor import Course
from carpool.planning.holds import Hold
from carpool.planning.spec import ModelSpec, Signature

# Guesses: warm, opening took 0.2 s a group on an H200, and an eager step 1 to 2 ms; cold was not timed.
TRACED_STEPS, CAPTURED_STEPS = 500, 100


class TorchAdapter(Adapter):
    """PyTorch for one run: it remembers what it built for each job."""

    name = "torch"

    def __init__(self, compile: str | bool = "auto") -> None:
        super().__init__(compile)
        self._known: dict[Job, Known] = {}
        self._owners: dict[int, tuple[Any, str]] = {}
        self._probes: dict[Signature, Probe] = {}
        self._probe_keys: dict[Signature, Hashable] = {}
        self._alike: Counter[Signature] = Counter()
        self._made: dict[int, tuple[Any, Any]] = {}
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._store = Store()
        self._place = Place()
        self._streams = Streams(self._place)
        self.fuser = self._stacker = TorchFuser(self._known.__getitem__, self._store, self._place, compile)

    @classmethod
    def claims(cls, model: Any) -> bool:
        return isinstance(model, nn.Module)

    def device(self, name: str) -> str:
        wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        place = "cuda:0" if wanted == "cuda" and len(known) > 1 else wanted
        if place not in known:
            raise DeviceError(
                sentence(f"a device out of auto, {', '.join(known)}", repr(name), 'pass device="auto"')
            )
        if place.startswith("cuda"):
            torch.cuda.synchronize(
                place
            )  # its context takes memory: it is there before anybody asks what is free
        self._place.name = place
        return place

    def keeps_shares(self) -> bool:
        return is_kept(self._place())

    def describe(self, job: Job) -> ModelSpec:
        built = self._build(job)
        signature = job_signature(built)
        shown = self._probed(built, signature)
        course = _course(built)
        self._alike[signature] += job not in self._known
        self._known[job] = Known(built, shown, signature, course)
        held = (*built.data.tensors, *(built.validation.tensors if built.validation else ()))
        data: dict[Hashable, int] = {key_of(tensor): tensor.nbytes for tensor in held}
        return ModelSpec(
            str(job.name),
            self.name,
            signature,
            course,
            _state_bytes(built),
            shown.saved_bytes,
            tuple(data.items()),
            None if job.budget is None else size(job.budget),
            busy=busy(shown.convolved, self._place()),
        )

    def _probed(self, built: Built, signature: Signature) -> Probe:
        """What a step of this structure shows, seen once in a process."""
        if signature not in self._probes:
            key = (signature, seen_on(built), flags())
            self._probe_keys[signature] = key
            self._probes[signature] = remembered(key) or probe(built, behaviour)
        return self._probes[signature]

    def _build(self, job: Job) -> Built:
        made = model_or_factory(job)
        with ambient.seeded(job.seed):
            model = build_model(job, made)
            self._own_parts(job, model)
            ambient.reseed(job.seed)  # an optimizer draws nothing else because a model drew before it
            phases = build_phases(job, model)
        for phase in phases:
            self._own(job, phase.optimizer, "optimizer")
        validation = None
        if job.validation_data is not None:
            held = self._resolved(job.validation_data)
            if is_stream(held):
                held = self._gathered(held, job.batch_size)
            validation = build_data(job, held, None, "validation_data")
        return Built(
            job=job,
            model=model,
            phases=phases,
            data=self._data(job),
            validation=validation,
            evaluate=evaluation(job, model, phases),
            manual=lightning.manual(job) if _updates_itself(job, model) else None,
        )

    def _own_parts(self, job: Job, model: nn.Module) -> None:
        self._own(job, model, "model")
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._own(job, parameter, "trainable parameters")
        for module in model.modules():
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                self._own(job, module, "normalisation in training mode")

    def _data(self, job: Job) -> Arrays:
        data = self._resolved(job.data)
        if not is_stream(data):
            return build_data(job, data, job.index, "data")
        return self._streams.of(job, data, job.data if callable(job.data) and job.data is not data else None)

    def _gathered(self, data: Any, batch_size: int) -> Any:
        """Validation that comes in batches is read once and kept as arrays."""
        if id(data) not in self._kept:
            self._kept[id(data)] = (data, self._streams.gathered(data, batch_size))
        return self._kept[id(data)][1]

    def _own(self, job: Job, thing: Any, word: str) -> None:
        _, owner = self._owners.setdefault(
            id(thing), (thing, str(job.name))
        )  # held, so that no id comes twice
        if owner != job.name:
            raise ModelError(
                sentence(
                    f"every job to have its own {word}",
                    f"one {type(thing).__name__} in {owner!r} and {job.name!r}",
                    f"pass a function that makes the {word}, or copy it",
                )
            )

    def _resolved(self, data: Any) -> Any:
        """Arrays, or what a function of none makes; one function is called once, so its arrays are shared."""
        if not callable(data) or is_stream(data):
            return data
        if id(data) not in self._made:
            with ambient.kept():
                self._made[id(data)] = (data, data())
        return self._made[id(data)][1]

    def open(self, job: Job, device: str, plain: bool = False, exact: bool = False) -> Session:
        known = self._known[job]
        alike, reason = self._alike[known.signature], None
        wanted = self.compile is True or (device.startswith("cuda") and _is_long(known.course, alike))
        if not (plain or exact) and self._is_quick_alone(job):
            return self._stacker.open_alone(job, device, alike)
        if wanted and not (plain or exact):
            reason = self._stacker.refusal([job])
            if reason is None:  # a stack of one: compiled, and captured on a GPU
                return self._stacker.open_alone(job, device, alike)
        session = SoloSession(
            known.built,
            known.course,
            device,
            self._store,
            known.probe.random,
            known.probe.is_ambient,
            quick=not exact,
        )
        session.note = f"not compiled: {reason}" if reason else ""
        return session

    def is_full(self, error: BaseException) -> bool:
        return super().is_full(error) or full.is_full(error)

    def free(self) -> None:
        full.free()

    def close(self) -> None:
        self._streams.stop()
        for signature, shown in self._probes.items():
            remember(self._probe_keys[signature], shown)
        end_run()
        heap.give_back()

    def absorb(self, job: Job, state: JobState) -> Trained:
        absorb_into(self._known[job].built, state)
        return self.trained(job)

    def left(self, job: Job) -> JobState:
        return on_host(initial_states(self._known[job].built))

    def outlook(self, jobs: Sequence[Job], strategy: str) -> str:
        if strategy == "fused":
            return self._stacker.outlook(jobs)
        is_quick = len(jobs) == 1 and strategy == "interleaved"
        return "as machine code" if is_quick and self._is_quick_alone(jobs[0]) else ""

    def code(self, jobs: Sequence[Job], strategy: str) -> str:
        may_be_code = strategy == "fused" or self.outlook(jobs, strategy)
        return self._stacker.code(jobs) if may_be_code else ""

    def _is_quick_alone(self, job: Job) -> bool:
        return self._stacker.is_quick_alone(job, self._alike[self._known[job].signature])

    def hold(self, job: Job, measure: bool) -> Hold | None:
        if self._is_quick_alone(job):
            return None  # its steps run without Python's lock
        return hold_of(self._known[job], self._place(), measure)

    def trained(self, job: Job) -> Trained:
        built = self._known[job].built
        optimizers = tuple(phase.optimizer for phase in built.phases)
        schedulers = tuple(phase.timer.scheduler if phase.timer else None for phase in built.phases)
        if len(optimizers) == 1 and job.phases is None:
            return Trained(built.model, optimizers[0], schedulers[0])
        return Trained(built.model, optimizers, schedulers)

    def weights(self, model: Any) -> Mapping[str, Array]:
        return saved.weights(model)

    def load_weights(self, model: Any, weights: Mapping[str, Array]) -> Any:
        return saved.load_weights(model, weights)

    def optimizer_state(self, model: Any, optimizer: Any, scheduler: Any) -> Any:
        return saved.optimizer_state(optimizer, scheduler)

    def load_optimizer(self, model: Any, optimizer: Any, scheduler: Any, state: Any) -> Any:
        return saved.load_optimizer(optimizer, scheduler, state)

    def predict(self, models: Sequence[Any], inputs: Any, batch_size: int | None, device: str) -> list[Any]:
        return predict(models, inputs, batch_size, self.device(device))

    def stack(
        self, models: Sequence[Any], optimizers: Sequence[Any], seeds: Sequence[int], compile: bool
    ) -> Kept:
        return Kept(make_members(models, optimizers, seeds), compile)


def _is_long(course: Course, alike: int) -> bool:
    """Whether tracing a step, which jobs that are alike share, and capturing it pay for themselves; of a stream it is not known how long it is."""
    traced = course.steps * alike >= TRACED_STEPS and course.steps >= CAPTURED_STEPS
    return not course.steps or traced


def _course(built: Built) -> Course:
    data, epochs = built.data, built.job.epochs
    if isinstance(data, Streamed):
        return Course((data.batches or 0) * data.length, data.length, epochs, streamed=True)
    return Course(data.length, built.job.batch_size, epochs)


def _updates_itself(job: Job, model: nn.Module) -> bool:
    return lightning.is_lightning(job, model) and lightning.is_manual(model)


def _state_bytes(built: Built) -> int:
    """Weights, gradients (twice where they accumulate), and optimizer slots for what is trained.

    Of slots there are two, or as many as the optimizer of any phase has if that is more.
    """
    parameters = list(built.model.parameters())
    held = sum(t.nbytes for t in (*parameters, *built.model.buffers()))
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    grads = 1 if built.job.accumulate == 1 else 2
    return held + (grads + max([2, *map(_num_slots, built.phases)])) * trained


def _num_slots(phase: LivePhase) -> int:
    update = UPDATES.get(type(phase.optimizer))
    return (
        max((len(update.slots(group)) for group in phase.optimizer.param_groups), default=0) if update else 0
    )
