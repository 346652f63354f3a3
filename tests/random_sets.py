"""Random sets of jobs, trained together and each alone. A seed makes a set; `check(framework, seed)` runs it.

`python tests/random_sets.py torch 17` runs one set by itself, `... torch 0 1400` so many from the first on.
"""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import carpool
from carpool.errors import FusionError
from carpool.result import Outcome, Result

ENDED = (Outcome.COMPLETED, Outcome.STOPPED, Outcome.DIVERGED)
"""How jobs end whose weights say something; of one that raised only that is compared."""


class Case(Protocol):
    """What one job of a set is made of: numbers and words, so that it can be built again and again."""

    @property
    def name(self) -> str: ...


class Made(Protocol):
    """What a framework makes of a seed. Every `build` makes new objects, so that two runs share nothing."""

    def cases(self, draw: random.Random) -> tuple[Sequence[Case], str]:
        """The jobs of a set, and a strategy."""
        ...

    def build(self, case: Any) -> carpool.Job: ...

    def weights(self, result: Result) -> Mapping[str, np.ndarray]: ...

    def by_hand(self, case: Any) -> Mapping[str, np.ndarray] | None:
        """The weights at the end of a plain loop; None where there is none for it."""
        ...

    def alone(self, case: Any, strategy: str) -> str:
        """The strategy by which the job alone is trained: "in_turn", or the set's where numbers drawn depend on the way."""
        ...

    def allowed(self, case: Any, exact: bool) -> float:
        """How far apart weights may be, relative to the largest of their tensor, or to one."""
        ...


@dataclass
class Tally:
    """What was compared."""

    sets: int = 0
    jobs: int = 0
    by_hand: int = 0
    failed: int = 0
    threads: int = 0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Mismatch(AssertionError):
    """A job that did not end where it ends alone."""


def made_of(framework: str) -> Made:
    return importlib.import_module(f"random_{framework}").MADE


def check(framework: str, seed: int) -> Tally:
    """Trains the set, then each of its jobs alone, and compares. Raises with a line that repeats it."""
    made, draw = made_of(framework), random.Random(f"{framework} {seed}")
    cases, strategy = made.cases(draw)
    threads = 2 if len(cases) > 1 and draw.random() < 0.15 else 1
    try:
        return _checked(made, cases, strategy, threads)
    except BaseException as error:
        said = f"python tests/random_sets.py {framework} {seed}  # {strategy}, {threads} thread(s)"
        raise Mismatch(f"{said}\n{type(error).__name__}: {error}") from error


def _checked(made: Made, cases: Sequence[Case], strategy: str, threads: int) -> Tally:
    before = generators()
    together = _together(made, cases, strategy, threads)
    same(generators(), before, "the process's own generators")
    tally = Tally(sets=1, threads=int(threads > 1))
    for case in cases:
        alone = _trained(made, [case], made.alone(case, strategy))[case.name]
        ours = together[case.name]
        _compare(made, case, ours, alone, exact=strategy == "in_turn" and threads == 1)
        tally.jobs += 1
        tally.failed += alone.outcome not in ENDED
        tally.by_hand += _compare_by_hand(made, case, ours)
    return tally


def _together(made: Made, cases: Sequence[Case], strategy: str, threads: int) -> dict[str, Result]:
    """The results by name, of one call or of one in each thread."""
    parts = [cases[first::threads] for first in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        runs = [pool.submit(_trained, made, part, strategy) for part in parts[1:]]
        found = _trained(made, parts[0], strategy)
        for run in runs:
            found |= run.result()
    return found


def _trained(made: Made, cases: Sequence[Case], strategy: str) -> dict[str, Result]:
    """The results by name; a set that cannot be stacked trains as it can be."""
    try:
        results = carpool.train(
            [made.build(case) for case in cases],
            device="cpu",
            strategy=strategy,
            compile=False,
            reporters=[],
        )
    except FusionError:
        return _trained(made, cases, "auto")
    except Exception as error:  # all of them failed
        results = getattr(error, "results", None)
        if results is None:
            raise
    return {str(result.name): result for result in results}


def _compare(made: Made, case: Case, ours: Result, alone: Result, exact: bool) -> None:
    assert ours.outcome is alone.outcome, f"{case}: {ours.outcome} ({ours.error}), alone {alone.outcome}"
    if alone.outcome not in ENDED:
        return
    limit = made.allowed(case, exact)
    near(made.weights(ours), made.weights(alone), limit, f"{case}, {ours.strategy} ({ours.reason})")
    assert list(ours.history) == list(alone.history), case
    for name, values in alone.history.items():
        what = f"{case}: history of {name}"
        loose = max(10 * limit, 1e-12)  # sums over batches: where a chunk ends is a matter of time
        near({name: np.asarray(ours.history[name])}, {name: np.asarray(values)}, loose, what)


def _compare_by_hand(made: Made, case: Case, ours: Result) -> bool:
    if ours.outcome not in (Outcome.COMPLETED, Outcome.STOPPED):
        return False
    by_hand = made.by_hand(case)
    if by_hand is not None:
        near(made.weights(ours), by_hand, made.allowed(case, False), f"{case}, beside a plain loop")
    return by_hand is not None


def near(ours: Mapping[str, Any], theirs: Mapping[str, Any], limit: float, what: str) -> None:
    assert ours.keys() == theirs.keys(), what
    for name, value in theirs.items():
        a, b = np.asarray(ours[name], np.float64), np.asarray(value, np.float64)
        assert a.shape == b.shape, f"{what}: {name} {a.shape} {b.shape}"
        apart = np.abs(a - b).max(initial=0.0)
        largest = max(1.0, np.abs(b).max(initial=0.0)) if limit else 1.0
        if not (apart <= limit * largest or np.array_equal(a, b, equal_nan=True)):
            raise AssertionError(f"{what}: {name!r} is {apart:.1e} away, allowed {limit * largest:.1e}")


def generators() -> list[Any]:
    """What the process's own generators are."""
    kind, words, position, *_ = np.random.get_state()
    torch = sys.modules.get("torch")
    own = torch.get_rng_state().numpy().tobytes() if torch is not None else None
    return [random.getstate(), (kind, np.asarray(words).tobytes(), position), own]


def same(ours: Any, theirs: Any, what: str) -> None:
    assert ours == theirs, f"{what} have moved"


def main(arguments: Sequence[str]) -> None:
    """Runs the sets of these seeds: a framework, a first seed, and how many."""
    framework, first, count = arguments[0], int(arguments[1]), int((*arguments, "1")[2])
    warnings.simplefilter("ignore")
    total, failed = Tally(), []
    for seed in range(first, first + count):
        try:
            total.add(check(framework, seed))
        except Mismatch as error:
            failed.append(seed)
            print(error, flush=True)
        if seed % 50 == 49:
            print(seed + 1, total, failed, flush=True)
    print(framework, total, "failed:", failed, flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
