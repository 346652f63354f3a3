"""The generators that belong to the whole process: Python's, NumPy's, torch's and TensorFlow's.

Whoever draws from them disturbs everybody else who does. So what has to depend on a job's own seed (a factory, a step that runs
operator by operator, a loop of the user's own) draws inside `seeded` or `Ambient.inside`: the generators are put in place, and
everybody else's are put back. Only one thread is inside at a time.

Sources are read in threads of their own meanwhile. One that draws nothing waits for nobody; one that was seen to draw takes
turns with the others, with generators of its own (`Reading`).

No framework is imported: it has a state only where someone has imported it.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

_TWISTER_BYTES = 625 * 4  # 624 words of the Mersenne Twister, and how many of them are used
_PATIENCE_S = 10.0  # how long others wait for a source that draws and is in the middle of a batch
_CLEAN = 4  # batches in which a source drew nothing, until it is believed to draw nothing


@dataclass(frozen=True)
class _Terms:
    """`put` puts generators in place, `took` sees what became of them; outside they stay what they were."""

    names: Iterable[str] = ()
    put: Callable[[], None] = lambda: None
    took: Callable[[], None] = lambda: None
    reads: bool = False


class _Turns:
    """One owner of the process's generators at a time, in the order in which they asked, and what they were before."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()
        self._owner: object | None = None
        self._idents: frozenset[int] = frozenset()
        self._reads = False  # whether the owner is a source in the middle of a batch
        self._outer: dict[str, Any] = {}
        self._terms: _Terms | None = None
        self.count = 0
        """How often somebody was inside."""

    @property
    def is_mine(self) -> bool:
        return threading.get_ident() in self._idents

    def own(self) -> dict[str, Any]:
        """What the generators are while nobody is inside; for whoever is."""
        return {**_read(_STATES), **self._outer}

    def enter(self, terms: _Terms, me: object) -> None:
        """Waits for its turn; a source that is in the middle of a batch is not waited for endlessly."""
        reads = terms.reads
        with self._changed:
            self._asked.append(me)
            try:
                while self._owner is not None or self._asked[0] is not me:
                    is_next = self._asked[0] is me and self._reads and not reads
                    if not self._changed.wait(_PATIENCE_S if is_next else None) and self._reads:
                        warnings.warn(_SLOW, stacklevel=5)
                        break  # what it draws from now on is nobody's
            finally:
                self._asked.remove(me)
            if self._owner is None:
                self._outer = _read(terms.names)
            self._owner, self._terms, self._reads = me, terms, reads
            self._idents = frozenset({threading.get_ident()})
            self.count += 1
        terms.put()

    def leave(self, me: object) -> None:
        with self._changed:
            if self._owner is not me or self._terms is None:  # another did not wait for it
                return
            try:
                self._terms.took()
            finally:
                _write(self._outer)
                self._owner, self._terms, self._outer, self._idents = None, None, {}, frozenset()
                self._changed.notify_all()

    def lend(self, ident: int) -> None:
        """The owner's turn is that thread's too."""
        self._idents |= {ident}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Others may go inside while the owner waits for them."""
        me, terms = self._owner, self._terms
        if not self.is_mine or me is None or terms is None:
            yield
            return
        self.leave(me)
        try:
            yield
        finally:
            self.enter(terms, me)


_turns = _Turns()
_SLOW = (
    "carpool: a data source that draws from the process's random generators has been in the middle of a batch for "
    f"{_PATIENCE_S:.0f} s, and others go on without it; what it draws in this batch may disturb them. Give it a generator "
    "of its own: torch.Generator(), numpy.random.default_rng(seed)"
)


aside = _turns.aside


@contextmanager
def _inside(terms: _Terms) -> Iterator[None]:
    if _turns.is_mine:
        others = _read(terms.names)
        try:
            terms.put()
            yield
        finally:
            terms.took()
            _write(others)
        return
    me = object()
    try:
        _turns.enter(terms, me)
        yield
    finally:
        _turns.leave(me)


@contextmanager
def seeded(seed: int, names: Iterable[str] | None = None) -> Iterator[None]:
    """The process's generators, or those of these modules, seeded inside and as they were outside.

    >>> import random
    >>> with seeded(3):
    ...     first = random.random()
    >>> random.seed(3)
    >>> first == random.random()
    True
    """
    chosen = tuple(names or _STATES)
    with _inside(_Terms(chosen, lambda: reseed(seed, chosen))):
        yield


def reseed(seed: int, names: Iterable[str] | None = None) -> None:
    """Seeds the process's generators, or those of these modules; for whoever is inside."""
    for name in names or _STATES:
        if _STATES[name].here():
            _STATES[name].seed(seed)


class Ambient:
    """The generators of someone who draws, waits and goes on drawing, from a seed on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] = {}

    @contextmanager
    def inside(self, ident: int | None = None) -> Iterator[None]:
        """Its own states inside, everybody else's outside. `ident` is a thread that works for this one meanwhile."""
        with _inside(_Terms(_STATES, self._put, self._took)):
            if ident is not None:
                _turns.lend(ident)
            yield

    def _put(self) -> None:
        _write(self._states)
        reseed(self._seed, [name for name in _STATES if name not in self._states])

    def _took(self) -> None:
        self._states = _read(_STATES)


class Reading:
    """The generators of a source that is read in a thread: at first as the process's were when the source was opened.

    A source that draws nothing waits for nobody. Whether it draws is seen: its first batches, and the first of each pass, are
    read while nobody else is inside, and so are all after one that drew.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._clean = 0
        with _inside(_Terms()):
            self._states = _turns.own()

    @contextmanager
    def batch(self, begins: bool = False) -> Iterator[None]:
        """While the source's own code runs; `begins` at the beginning of a pass."""
        if begins or self._clean < _CLEAN:
            with _inside(_Terms(_STATES, lambda: _write(self._states), self._took, reads=True)):
                before = _marks()
                yield
                self._clean = self._clean + 1 if _marks() == before else 0
        else:
            before, count = _marks(), _turns.count
            yield
            if (
                _marks() != before and _turns.count == count
            ):  # and if others were inside, nobody knows who drew
                self._clean = 0

    def _took(self) -> None:
        self._states = _read(_STATES)


@contextmanager
def drawn() -> Iterator[list[str]]:
    """The modules whose generators were drawn from inside; known afterwards."""
    found: list[str] = []
    before = {name: state.mark() for name, state in _STATES.items() if state.here()}
    yield found
    found += [name for name, mark in before.items() if _STATES[name].mark() != mark]


# The generators themselves


class _State:
    """A generator of the process, where its module has been imported."""

    module: str

    def here(self) -> bool:
        return self.module in sys.modules

    def seed(self, seed: int) -> None: ...

    def read(self) -> Any: ...

    def write(self, state: Any) -> None: ...

    def mark(self) -> Any:
        """What is another once somebody has drawn."""
        return self.read()


class _Python(_State):
    module = "random"

    def seed(self, seed: int) -> None:
        random.seed(seed % 2**64)

    def read(self) -> Any:
        return random.getstate()

    def write(self, state: Any) -> None:
        random.setstate(state)


class _Numpy(_State):
    module = "numpy"

    def seed(self, seed: int) -> None:
        np.random.seed(seed % 2**32)

    def read(self) -> Any:
        return np.random.get_state()

    def write(self, state: Any) -> None:
        np.random.set_state(state)

    def mark(self) -> Any:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if isinstance(generator, np.random.MT19937):  # to read its state takes 50 us
            return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
        return repr(generator.state)


class _Torch(_State):
    """Torch's generators, of the host and of devices that are in use.

    While CUDA sleeps, torch's own `manual_seed` stores a stack trace for each call until it wakes: 1 ms and a leak.
    """

    module = "torch"

    def here(self) -> bool:
        return hasattr(sys.modules.get("torch"), "default_generator")  # not while it is being imported

    def seed(self, seed: int) -> None:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(seed % 2**64)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed % 2**64)

    def read(self) -> Any:
        torch = sys.modules["torch"]
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return torch.get_rng_state(), cuda

    def mark(self) -> Any:
        torch = sys.modules["torch"]
        return torch.get_rng_state().numpy().tobytes()

    def write(self, state: Any) -> None:
        torch = sys.modules["torch"]
        host, cuda = state
        torch.set_rng_state(host)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class _TensorFlow(_State):
    """TensorFlow's seed of eager operations, and the generator that gives each operation its own."""

    module = "tensorflow"

    def here(self) -> bool:
        return self._context() is not None

    def seed(self, seed: int) -> None:
        sys.modules["tensorflow"].random.set_seed(seed % 2**31)

    def read(self) -> Any:
        context: Any = self._context()
        rng = getattr(context, "_rng", None)
        return context._seed, rng, rng.getstate() if rng is not None else None

    def write(self, state: Any) -> None:
        context: Any = self._context()
        context._seed, rng, held = state
        if rng is not None:
            rng.setstate(held)
            context._rng = rng
        elif hasattr(context, "_rng"):
            del context._rng

    @staticmethod
    def _context() -> Any:
        """TensorFlow's context; None where it is not there, or keeps its seed elsewhere."""
        if not hasattr(getattr(sys.modules.get("tensorflow"), "random", None), "set_seed"):
            return None
        found = getattr(sys.modules.get("tensorflow.python.eager.context"), "context", lambda: None)()
        return found if hasattr(found, "_seed") else None


_STATES: dict[str, _State] = {
    "random": _Python(),
    "numpy": _Numpy(),
    "torch": _Torch(),
    "tensorflow": _TensorFlow(),
}


def _read(names: Iterable[str]) -> dict[str, Any]:
    return {name: _STATES[name].read() for name in names if _STATES[name].here()}


def _write(states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        _STATES[name].write(state)


def _marks() -> list[Any]:
    return [state.mark() for state in _STATES.values() if state.here()]
