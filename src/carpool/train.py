"""The entry: describe, plan, drive, collect."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from carpool import adapters, collector
from carpool import reporters as reporting
from carpool.adapters.base import Adapter
from carpool.environment import cores
from carpool.errors import CarpoolError, Interrupted, JobError, OptionError, described, raise_with, sentence
from carpool.events import Emit, EpochEnded, EpochsEnded, Event, RunEnded, RunStarted, hears
from carpool.executors import isolated
from carpool.executors.interleaved import Orders, Run
from carpool.executors.interrupt import Pause
from carpool.job import Job, named
from carpool.memory import device as devices
from carpool.memory.estimate import Footprint
from carpool.memory.size import Limit, Size, limit
from carpool.planning.choose import check_strategy
from carpool.planning.holds import Hold
from carpool.planning.plan import Plan, make_plan
from carpool.planning.spec import ModelSpec
from carpool.planning.trials import Trial
from carpool.process import worker
from carpool.result import Outcome, Result, Results

Reporters = str | Sequence[Callable[[Event], None]]


def train(
    jobs: Iterable[Job],
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

    The models and optimizers you passed hold the trained state afterwards. A job that fails is a value in the results; where all of them
    failed, or at the first with `on_error="raise"`, its error is raised, and carries what there is as `error.results`. `verify=True` goes on comparing a sample of
    every fused group with solo steps. `memory` is what all of them together may take on the device: "16GiB", "90%", or "auto" for
    what is free; whoever does not fit beside the others waits. `compile` says whether fused steps are compiled: "auto" in the background, when it pays.

    >>> import torch, carpool
    >>> x, y = torch.randn(64, 4), torch.randn(64, 1)
    >>> def job(lr):
    ...     return carpool.Job(lambda: torch.nn.Linear(4, 1), (x, y), loss=torch.nn.functional.mse_loss,
    ...                        optimizer=lambda p: torch.optim.SGD(p, lr=lr), epochs=2)
    >>> results = carpool.train(carpool.grid(job, lr=[0.1, 0.01]), device="cpu", reporters=[])
    >>> [result.outcome.word for result in results]
    ['completed', 'completed']
    """
    _check_options(on_error, compile)
    started = time.perf_counter()
    jobs = list(jobs)
    with collector.set_aside(len(jobs)):
        prepared = _prepare(jobs, device, strategy, compile, limit(memory), ("holds",))
        with prepared, _Reporting(reporters) as emit, Pause() as pause:
            orders = Orders(prepared.plan.device, strategy, verify, on_error)
            run = Run(prepared.plan, prepared.jobs, prepared.adapters, orders, emit)
            emit(RunStarted(prepared.plan, prepared.plan.device, sum(s.course.steps for s in prepared.specs)))
            try:
                run.groups(pause)
            except KeyboardInterrupt:
                raise Interrupted(prepared.results(run, time.perf_counter() - started)) from None
            except Exception as error:
                raise_with(error, prepared.results(run, time.perf_counter() - started))
            seconds = time.perf_counter() - started
            emit(RunEnded(seconds))
    results = prepared.results(run, seconds)
    _raise_if_all_failed(results)
    return results


def plan(
    jobs: Iterable[Job],
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
    wanted = ("holds", "trials") if measure else ()
    with _prepare(jobs, device, strategy, "auto", limit(memory), wanted) as prepared:
        return prepared.plan


@dataclass(frozen=True)
class _Prepared:
    """Jobs described and planned."""

    jobs: dict[str, Job]
    adapters: dict[str, Adapter]
    specs: tuple[ModelSpec, ...]
    plan: Plan

    def __enter__(self) -> _Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing that was opened to describe the jobs is left running."""
        _close(self.adapters)

    def results(self, run: Run, seconds: float) -> Results:
        """The results in the order of the jobs; a job the run never reached was interrupted."""
        return Results([run.results.get(name) or self._unreached(name) for name in self.jobs], seconds)

    def _unreached(self, name: str) -> Result:
        return Result(name, Outcome.INTERRUPTED, dict(self.jobs[name].config or {}))


def _prepare(
    jobs: Iterable[Job],
    device: str,
    strategy: str,
    compile: str | bool,
    most: Limit,
    measure: Collection[str] = (),
) -> _Prepared:
    """`measure` names what is measured now where it is not remembered: "holds", "trials"."""
    check_strategy(strategy)
    by_name = {str(job.name): job for job in named(jobs)}
    loaded: dict[str, Adapter] = {}
    try:
        with collector.put_off():
            return _planned(by_name, loaded, device, strategy, compile, most, measure)
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
) -> _Prepared:
    specs: list[ModelSpec] = []
    rejected: dict[str, BaseException] = {}
    owners = {name: _adapter(job, loaded, compile) for name, job in by_name.items()}
    for adapter in loaded.values():
        adapter.device(device)
        adapter.expect([job for name, job in by_name.items() if owners[name] is adapter])
    for name, job in by_name.items():
        try:
            spec = owners[name].describe(job)
            specs.append(replace(spec, apart=_apart(job, owners[name], strategy, spec.apart)))
        except CarpoolError:
            raise
        except Exception as error:  # the user's own factory or data raised: that job's failure, not the run's
            rejected[name] = error

    def refusal(members: Sequence[ModelSpec]) -> str | None:
        fuser = loaded[members[0].adapter].fuser
        if fuser is None:
            return f"the {members[0].adapter} adapter cannot stack models"
        return (
            fuser.refusal([by_name[spec.name] for spec in members])
            if strategy in ("auto", "fused", "isolated")
            else None
        )

    def tried(members: Sequence[ModelSpec]) -> Trial | None:
        fuser = loaded[members[0].adapter].fuser
        if fuser is None or strategy not in ("auto", "isolated"):
            return None
        here = strategy == "auto" and not any(spec.apart for spec in members)  # a worker tries for itself
        return fuser.tried([by_name[spec.name] for spec in members], here and "trials" in measure)

    def footprint(members: Sequence[ModelSpec]) -> Footprint | None:
        fuser = loaded[members[0].adapter].fuser
        return fuser.footprint([by_name[spec.name] for spec in members]) if fuser else None

    def holds(members: Sequence[ModelSpec]) -> Hold | None:
        if strategy != "auto" or where != "cpu" or cores() < 2 or worker.here():
            return None
        held = [by_name[spec.name] for spec in members]
        found = loaded[members[0].adapter].hold(held[0], "holds" in measure)
        return found if found is not None and all(isolated.is_picklable(job) for job in held) else None

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
    return _Prepared(by_name, loaded, tuple(specs), made)


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


def _close(loaded: Mapping[str, Adapter]) -> None:
    for adapter in loaded.values():
        adapter.close()


def _adapter(job: Job, loaded: dict[str, Adapter], compile: str | bool) -> Adapter:
    is_factory = isinstance(job.model, str) or (callable(job.model) and not _is_model(job.model))
    kind = adapters.for_factory(job) if is_factory else adapters.claiming(job.model)
    return loaded.setdefault(kind.name, kind(compile))


def _is_model(model: Any) -> bool:
    try:
        adapters.claiming(model)
    except CarpoolError:
        return False
    return True


def _check_options(on_error: str, compile: str | bool) -> None:
    if on_error not in ("collect", "raise"):
        raise OptionError(sentence('on_error="collect" or "raise"', repr(on_error), "pass one of the two"))
    if compile not in ("auto", True, False):
        raise OptionError(sentence('compile="auto", True or False', repr(compile), "pass one of the three"))


def _raise_if_all_failed(results: Results) -> None:
    errors = [result.error for result in results]
    if errors and all(error is not None for error in errors):
        assert errors[0] is not None
        raise_with(errors[0], results)


class _Reporting:
    """The reporters of a run: to each the events that it hears; whatever happens, those that can be closed are."""

    def __init__(self, reporters: Reporters) -> None:
        if isinstance(reporters, str) and reporters != "auto":
            raise OptionError(
                sentence(
                    'reporters="auto" or a list of functions', repr(reporters), "pass reporters=[] for none"
                )
            )
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
            try:
                reporter(event)
            except Exception as error:  # a reporter watches: what it raises must not change what it watches
                self._reporters.remove(reporter)
                text = f"carpool: reporter {reporter!r} raised {described(error)}; the run goes on without it"
                warnings.warn(text, stacklevel=2)

    def __exit__(self, *_: object) -> None:
        for reporter in self._reporters:
            if (close := getattr(reporter, "close", None)) is not None:
                close()
