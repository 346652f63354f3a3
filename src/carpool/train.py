"""The entry: describe, plan, drive, collect."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from carpool import adapters, collector
from carpool import reporters as reporting
from carpool.adapters.base import Adapter
from carpool.arguments import Arguments, hinted
from carpool.environment import cores
from carpool.errors import (
    CarpoolError,
    DeviceError,
    Interrupted,
    JobError,
    ModelError,
    OptionError,
    described,
    failure,
    noted,
    raisable,
    raise_with,
    sentence,
    shown,
)
from carpool.events import (
    Emit,
    EpochEnded,
    EpochsEnded,
    Event,
    PreparationBegan,
    RunEnded,
    RunStarted,
    hears,
)
from carpool.executors import isolated
from carpool.executors.interleaved import Orders, Run
from carpool.executors.interrupt import Pause
from carpool.job import Job, given, named
from carpool.memory import device as devices
from carpool.memory.estimate import Footprint
from carpool.memory.size import Limit, Size, limit
from carpool.planning.choose import check_strategy
from carpool.planning.holds import Hold
from carpool.planning.plan import Group, Plan, make_plan
from carpool.planning.spec import ModelSpec
from carpool.planning.trials import Trial
from carpool.process import worker
from carpool.result import Outcome, Result, Results

Reporters = str | Sequence[Callable[[Event], None]]


@hinted
def train(
    jobs: Job | Iterable[Job],
    *,
    device: str = "auto",
    memory: Size = "auto",
    strategy: str = "auto",
    verify: bool = False,
    on_error: str = "collect",
    reporters: Reporters = "auto",
    compile: str | bool = "auto",
) -> Results:
    """Trains all jobs, together where that is possible, each as if it were alone.

    One job alone is a list of one. The models and optimizers you passed hold the trained state afterwards. A job that fails is
    a value in the results; where all of them failed, or at the first with `on_error="raise"`, its error is raised, and carries
    what there is as `error.results`. `verify=True` goes on comparing a sample of
    every fused group with solo steps. `memory` is what all of them together may take on the device: "16GiB", "90%", or "auto" for
    what is free; whoever does not fit beside the others waits. `compile` says whether fused steps are compiled: "auto" when it
    pays, on a CPU as machine code where that is faster; "resident" insists on that.

    >>> import torch, carpool
    >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
    >>> def job(lr):
    ...     return carpool.Job(lambda: torch.nn.Linear(4, 1), (x, y), loss=torch.nn.functional.mse_loss,
    ...                        optimizer=lambda p: torch.optim.SGD(p, lr=lr), epochs=2)
    >>> results = carpool.train(carpool.grid(job, lr=[0.1, 0.01]), device="cpu", reporters=[])
    >>> [result.outcome.word for result in results]
    ['completed', 'completed']
    """
    _check_options(device, verify, on_error, compile)
    reporters = _listed_reporters(reporters)
    check_strategy(strategy)
    by_name = {str(job.name): job for job in named(list(given(jobs)))}
    reached: dict[str, Result] = {}
    started = time.perf_counter()

    def results() -> Results:
        return _results(by_name, reached, time.perf_counter() - started)

    with _Reporting(reporters) as emit, Pause() as pause:
        try:
            with (
                collector.set_aside(len(by_name)) as made,
                _prepare(
                    by_name, device, strategy, compile, limit(memory), ("holds",), pause, emit
                ) as prepared,
            ):
                orders = Orders(prepared.plan.device, strategy, verify, on_error)
                run = Run(prepared.plan, prepared.jobs, prepared.adapters, orders, emit, reached)
                steps = sum(spec.course.steps for spec in prepared.specs)
                emit(RunStarted(prepared.plan, prepared.plan.device, steps))
                _carry_out(run, pause, results)
                ended = results()
                made(map(_parts, ended))
                emit(RunEnded(ended.seconds))
            pause.check()
        except KeyboardInterrupt:
            raise Interrupted(results()) from None
    _raise_if_all_failed(ended)
    return ended


def _carry_out(run: Run, pause: Pause, results: Callable[[], Results]) -> None:
    """Runs the groups; an error that ends the run carries the results so far."""
    try:
        run.groups(pause)
    except Exception as error:
        raise_with(error, results())


def _parts(result: Result) -> list[Any]:
    """The objects that a job's model is."""
    held: list[Any] = [result.model]
    for one in (result.optimizer, result.scheduler):
        held += one if isinstance(one, tuple) else [one]
    return [one for one in held if one is not None]


@hinted
def plan(
    jobs: Job | Iterable[Job],
    *,
    device: str = "auto",
    memory: Size = "auto",
    strategy: str = "auto",
    measure: bool = False,
) -> Plan:
    """What `train` would do with these jobs, and why. Runs no step, unless asked to.

    `measure=True` measures what `train` would have to measure on the way, as far as it is not remembered: whether a group is faster fused or
    one by one, and how long a step holds Python's lock. That is done on copies: models, optimizers, random states and loaders are left
    as they are, and `train` uses the answers. It takes what opening each group takes, with compiling where that would pay in training.

    >>> import torch, carpool
    >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
    >>> job = carpool.Job(torch.nn.Linear(4, 1), (x, y), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD)
    >>> print(carpool.plan([job], device="cpu").groups[0].reason)
    no other job has its structure
    """
    with _foreseen(jobs, device, memory, strategy, measure) as prepared:
        return prepared.plan


def plan_and_code(
    jobs: Job | Iterable[Job], *, device: str = "auto", strategy: str = "auto", measure: bool = False
) -> tuple[Plan, tuple[str, ...]]:
    """The plan, and of each group the source of its training step as machine code (`Adapter.code`)."""
    with _foreseen(jobs, device, "auto", strategy, measure) as prepared:
        return prepared.plan, tuple(map(prepared.code, prepared.plan.groups))


@contextmanager
def _foreseen(
    jobs: Job | Iterable[Job], device: str, memory: Size, strategy: str, measure: bool
) -> Iterator[_Prepared]:
    """The jobs described and planned, as `train` would by itself."""
    _check_device(device)
    wanted = ("holds", "trials") if Arguments().flag("measure", measure) else ()
    check_strategy(strategy)
    by_name = {str(job.name): job for job in named(list(given(jobs)))}
    with (
        Pause() as pause,
        _prepare(by_name, device, strategy, "auto", limit(memory), wanted, pause) as prepared,
    ):
        yield prepared


def _results(by_name: Mapping[str, Job], reached: Mapping[str, Result], seconds: float) -> Results:
    """In the order of the jobs; one that the run never reached was interrupted."""
    found = [
        reached.get(name) or Result(name, Outcome.INTERRUPTED, dict(job.config or {}))
        for name, job in by_name.items()
    ]
    return Results(found, seconds)


@dataclass(frozen=True)
class _Prepared:
    """Jobs described and planned."""

    jobs: dict[str, Job]
    adapters: dict[str, Adapter]
    specs: tuple[ModelSpec, ...]
    plan: Plan

    def code(self, group: Group) -> str:
        """The source of a group's step as machine code."""
        return self.adapters[group.adapter].code([self.jobs[name] for name in group.names], group.strategy)

    def __enter__(self) -> _Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing that was opened to describe the jobs is left running."""
        _close(self.adapters)


def _prepare(
    by_name: dict[str, Job],
    device: str,
    strategy: str,
    compile: str | bool,
    most: Limit,
    measure: Collection[str],
    pause: Pause,
    emit: Emit = lambda event: None,
) -> _Prepared:
    """`measure` names what is measured now where it is not remembered: "holds", "trials". Ctrl-C is taken between two jobs, or two questions about them."""
    loaded: dict[str, Adapter] = {}
    try:
        with collector.put_off():
            return _planned(by_name, loaded, device, strategy, compile, most, measure, pause, emit)
    except BaseException:
        _close(loaded)
        raise


def _planned(
    by_name: dict[str, Job],
    loaded: dict[str, Adapter],
    device: str,
    strategy: str,
    compile: str | bool,
    most: Limit,
    measure: Collection[str],
    pause: Pause,
    emit: Emit,
) -> _Prepared:
    emit(PreparationBegan(f"building {len(by_name)} job(s)"))
    specs: list[ModelSpec] = []
    rejected: dict[str, BaseException] = {}
    owners = {name: _adapter(job, loaded, compile) for name, job in by_name.items()}
    for adapter in loaded.values():
        pause.check()
        adapter.device(device)
        own = [job for name, job in by_name.items() if owners[name] is adapter]
        _check_callbacks(own, adapter)
        adapter.expect(own)
    for name, job in by_name.items():
        pause.check()
        try:
            spec = owners[name].describe(job)
            specs.append(replace(spec, apart=_apart(job, owners[name], strategy, spec.apart)))
        except CarpoolError:
            raise
        except BaseException as error:
            failure(error)  # the user's own factory or data raised: that job's failure, not the run's
            rejected[name] = error

    def refusal(members: Sequence[ModelSpec]) -> str | None:
        pause.check()
        fuser = loaded[members[0].adapter].fuser
        if fuser is None:
            return f"the {members[0].adapter} adapter cannot stack models"
        return (
            fuser.refusal([by_name[spec.name] for spec in members])
            if strategy in ("auto", "fused", "isolated")
            else None
        )

    def tried(members: Sequence[ModelSpec]) -> Trial | None:
        pause.check()
        fuser = loaded[members[0].adapter].fuser
        if fuser is None or strategy not in ("auto", "isolated"):
            return None
        here = strategy == "auto" and not any(spec.apart for spec in members)  # a worker tries for itself
        return fuser.tried([by_name[spec.name] for spec in members], here and "trials" in measure)

    def footprint(members: Sequence[ModelSpec]) -> Footprint | None:
        pause.check()
        fuser = loaded[members[0].adapter].fuser
        return fuser.footprint([by_name[spec.name] for spec in members]) if fuser else None

    def holds(members: Sequence[ModelSpec]) -> Hold | None:
        pause.check()
        if strategy != "auto" or where != "cpu" or cores() < 2 or worker.here():
            return None
        held = [by_name[spec.name] for spec in members]
        found = loaded[members[0].adapter].hold(held[0], "holds" in measure)
        return found if found is not None and all(isolated.is_picklable(job) for job in held) else None

    pause.check()
    emit(PreparationBegan(f"planning {len(by_name)} job(s)"))
    where = next(iter(loaded.values())).device(device)
    seen = devices.read(where)
    made = make_plan(
        specs,
        refusal,
        device=where,
        free_bytes=most.of(seen.total_bytes, seen.free_bytes),
        strategy=strategy,
        tried=tried,
        footprint=footprint,
        holds=holds,
        rejected=rejected,
    )
    groups = []
    for group in made.groups:
        said = loaded[group.adapter].outlook([by_name[name] for name in group.names], group.strategy)
        groups.append(replace(group, reason=f"{group.reason}; {said}") if said else group)
    return _Prepared(by_name, loaded, tuple(specs), replace(made, groups=tuple(groups)))


def _apart(job: Job, adapter: Adapter, strategy: str, known: str) -> str:
    """Why the job needs a process of its own, if it does; `known` is what its adapter says."""
    if known and strategy not in ("auto", "isolated"):
        raise JobError(
            f"Job {job.name!r}: "
            + sentence('strategy="auto" or "isolated"', repr(strategy), f"change it: {known}")
        )
    kept_here = {"share"} if job.share is not None and adapter.keeps_shares() else set()
    wanted = [
        word for word in ("share", "timeout_s") if getattr(job, word) is not None and word not in kept_here
    ]
    if wanted and strategy not in ("auto", "isolated"):
        raise JobError(
            f"Job {job.name!r}: "
            + sentence(
                f'strategy="auto" or "isolated" for a job with {wanted[0]}=',
                repr(strategy),
                "only a process of its own can keep it: change one of the two",
            )
        )
    return f"{' and '.join(wanted)} can only be kept by a process of its own" if wanted else known


def _check_callbacks(jobs: Iterable[Job], adapter: Adapter) -> None:
    """Nobody calls an object that is not a function, but a framework that has such callbacks."""
    for job in jobs if not adapter.has_callbacks else ():
        stray = next((one for one in job.callbacks if not callable(one)), None)
        if stray is not None:
            remedy = "pass a function of an epoch's event"
            said = sentence(f"callbacks of a {adapter.name} job that are functions", shown(stray), remedy)
            raise JobError(f"Job {job.name!r}: {said}")


def _close(loaded: Mapping[str, Adapter]) -> None:
    for adapter in loaded.values():
        adapter.close()


def _adapter(job: Job, loaded: dict[str, Adapter], compile: str | bool) -> Adapter:
    is_factory = isinstance(job.model, str) or (callable(job.model) and not _is_model(job.model))
    try:
        kind = adapters.for_factory(job) if is_factory else adapters.claiming(job.model)
    except ModelError as error:
        raise ModelError(f"Job {job.name!r}: {error}") from None
    return loaded.setdefault(kind.name, kind(compile))


def _is_model(model: Any) -> bool:
    try:
        adapters.claiming(model)
    except CarpoolError:
        return False
    return True


def _check_options(device: Any, verify: Any, on_error: Any, compile: Any) -> None:
    _check_device(device)
    Arguments().flag("verify", verify)
    Arguments().choice("on_error", on_error, ("collect", "raise"))
    if not isinstance(compile, bool) and not (isinstance(compile, str) and compile in ("auto", "resident")):
        ways = 'compile="auto", "resident", True or False'
        raise OptionError(sentence(ways, shown(compile), "pass one of these"))


def _check_device(device: Any) -> None:
    if not isinstance(device, str):
        remedy = (
            f'pass device="{device}"' if "device" in type(device).__name__.lower() else 'pass "cuda:0", say'
        )
        raise DeviceError(sentence("a device's name as text", shown(device), remedy))


def _raise_if_all_failed(results: Results) -> None:
    errors = [result.error for result in results]
    if errors and all(error is not None for error in errors):
        assert errors[0] is not None
        raise_with(noted(raisable(errors[0]), results[0].name), results)


def _listed_reporters(reporters: Any) -> Reporters:
    if isinstance(reporters, str) and reporters == "auto":
        return reporters
    expected = 'reporters="auto" or a list of functions'
    if isinstance(reporters, str | Mapping) or not isinstance(reporters, Iterable):
        remedy = "pass [reporter]" if callable(reporters) else "pass reporters=[] for none"
        raise OptionError(sentence(expected, shown(reporters), remedy))
    listed = list(reporters)
    if (stray := next((one for one in listed if not callable(one)), None)) is not None:
        raise OptionError(sentence(expected, shown(stray), "pass functions of an event"))
    return listed


class _Reporting:
    """The reporters of a run: to each the events that it hears; whatever happens, those that can be closed are."""

    def __init__(self, reporters: Reporters) -> None:
        self._reporters = reporting.default() if isinstance(reporters, str) else list(reporters)

    def __enter__(self) -> Emit:
        return self

    @property
    def hears(self) -> frozenset[type] | None:
        """The events that somebody wants; None for all. Whoever hears of epochs together need not hear of each."""
        wanted = [getattr(reporter, "hears", None) for reporter in self._reporters]
        if any(one is None for one in wanted):
            return None
        together = [one - {EpochEnded} if EpochsEnded in one else one for one in wanted if one is not None]
        return frozenset().union(*together)

    def __call__(self, event: Event) -> None:
        for reporter in tuple(self._reporters):
            if not hears(reporter, type(event)):
                continue
            if not self._guarded(reporter, lambda to=reporter: to(event)):
                self._reporters.remove(reporter)

    def __exit__(self, *_: object) -> None:
        for reporter in self._reporters:
            if (close := getattr(reporter, "close", None)) is not None:
                self._guarded(reporter, close)

    def _guarded(self, reporter: Any, call: Callable[[], object]) -> bool:
        """Whether it went well: a reporter watches, and what it raises must not change what it watches."""
        try:
            call()
        except BaseException as error:
            text = f"carpool: reporter {reporter!r} raised {described(failure(error))}; the run goes on without it"
            warnings.warn(text, stacklevel=3)
            return False
        return True
