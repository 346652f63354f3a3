"""`map`: a function of one's own for many configs, each call in a process of ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from carpool.arguments import Arguments, hinted
from carpool.environment import cores
from carpool.errors import Interrupted, OptionError, described, raise_with, sentence, shown
from carpool.executors.interrupt import Pause
from carpool.memory import device
from carpool.memory.size import Size, limit
from carpool.process.messages import Call, Returned
from carpool.process.pool import Ended, Pool
from carpool.process.threads import threads
from carpool.process.wire import Blocks
from carpool.result import Outcome, Result, Results


@hinted
def map(
    function: Callable[..., Any],
    configs: Iterable[Any],
    *,
    workers: int | str = "auto",
    memory: Size = "auto",
    timeout_s: float | None = None,
) -> Results:
    """Calls your function once for each config, in worker processes, and gives the results in the order of the configs.

    A mapping is passed as keyword arguments, anything else as the one argument. `result.value` is what the function returned. A call
    that raises, or whose worker crashes or takes longer than `timeout_s`, has `outcome`, `error` and no value, and the others go on:
    nothing is raised for it. Lambdas and functions of a notebook work. Large arrays are not copied to each worker: all of them
    see the same memory, and what one writes into it only that one sees. `workers="auto"` is as many as there are cores;
    `memory` is what all workers together may hold, each an equal part of it.

    >>> import carpool
    >>> [result.value for result in carpool.map(lambda x, y: x + y, [{"x": 1, "y": 2}, {"x": 3, "y": 4}], workers=1)]
    [3, 7]
    """
    _check(function, workers)
    timeout_s = Arguments().seconds("timeout_s", timeout_s)
    listed = Arguments().listed("configs", configs, "pass [config] for one config")
    calls = [_call(function, config) for config in listed]
    size = max(1, min(len(calls), cores() if isinstance(workers, str) else int(workers)))
    found: dict[int, Result] = {}
    started = time.perf_counter()
    env = threads(size, cores(), os.environ)

    def results() -> Results:
        results = [found.get(i) or _result(i, config) for i, config in enumerate(listed)]
        return Results(results, time.perf_counter() - started)

    with Blocks() as blocks, Pause() as pause, Pool(size, env, timeout_s, _part(memory, size)) as pool:
        _survey(function, calls, blocks)
        try:
            for ended in pool.run(calls, blocks, pause.check):
                found[ended.position] = _result(ended.position, listed[ended.position], ended)
        except KeyboardInterrupt:
            raise Interrupted(results()) from None
        except Exception as error:
            raise_with(error, results())
    return results()


def _check(function: Any, workers: Any) -> None:
    if not callable(function):
        raise OptionError(sentence("a function", shown(function), "pass a callable"))
    if isinstance(workers, str) and workers == "auto":
        return
    try:
        Arguments().whole("workers", workers, "", least=1)
    except OptionError:
        expected = 'workers="auto" or a number of at least 1'
        raise OptionError(sentence(expected, shown(workers), "pass one of these")) from None


def _call(function: Callable[..., Any], config: Any) -> Call:
    return Call(function, (), dict(config)) if isinstance(config, Mapping) else Call(function, (config,))


def _part(memory: Size, workers: int) -> int | None:
    """What one worker may hold."""
    wanted = limit(memory)
    if wanted.size_bytes is None and wanted.share is None:
        return None
    host = device.read("cpu")
    return wanted.of(host.total_bytes, host.free_bytes) // workers


def _survey(function: Callable[..., Any], calls: Sequence[Call], blocks: Blocks) -> None:
    """What cannot be pickled is refused before anything runs."""
    try:
        Blocks().survey(function)
    except Exception as error:
        raise OptionError(
            sentence("a function that can be pickled", described(error), "open what it holds inside it")
        ) from error
    for position, call in enumerate(calls):
        try:
            blocks.survey(call)
        except Exception as error:
            expected = f"the config at position {position} to be something that can be pickled"
            remedy = "pass what the function can open by itself"
            raise OptionError(sentence(expected, described(error), remedy)) from error
    blocks.surveyed()


def _result(position: int, config: Any, ended: Ended | None = None) -> Result:
    shown = dict(config) if isinstance(config, Mapping) else {"argument": config}
    name = f"config-{position}"
    if ended is None:
        return Result(name, Outcome.INTERRUPTED, shown)
    taken = {"seconds": ended.seconds, "strategy": "isolated", "reason": "a call of carpool.map"}
    if isinstance(ended.answer, Returned):
        return Result(name, Outcome.COMPLETED, shown, value=ended.answer.value, **taken)
    return Result(name, Outcome.FAILED, shown, error=ended.answer.error, **taken)
