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
_PATIENCE_S = 10.0  # how long others wait for a source that is in the middle of a batch
_LOOKS = 20  # in that time: a machine that stands still for ten seconds has cost its threads one of them
_MOST_SEEDS = 256  # that are remembered
_CLEAN = 4  # batches in which a source drew nothing, until it is believed to draw nothing

States = Mapping[str, Any]
"""What generators are, by the name of their module."""


@dataclass(frozen=True)
class _Terms:
    """`put` puts generators in place, `took` is given what became of them; outside they stay what they were.

    `drew` says of a source that reads a batch whether it has drawn in it. One who reads nothing has no such question.
    """

    names: Iterable[str] = ()
    put: Callable[[], None] = lambda: None
    took: Callable[[States], None] | None = None
    drew: Callable[[], bool] | None = None


@dataclass
class _Frame:
    """Terms that hold at present, and what the generators were before."""

    terms: _Terms
    before: dict[str, Any]


class _Turn:
    """One who is inside: its threads, and its terms, the innermost last."""

    def __init__(self, terms: _Terms) -> None:
        self.terms = terms
        self.idents = frozenset({threading.get_ident()})
        self.frames: list[_Frame] = []

    def reads(self) -> bool:
        return self.terms.drew is not None

    def before(self, depth: int = 0) -> dict[str, Any]:
        """What the generators were when so many frames were open, as far as it has changed them."""
        found: dict[str, Any] = {}
        for frame in reversed(self.frames[depth:]):
            found |= frame.before
        return found

    def push(self, terms: _Terms) -> _Frame:
        frame = _Frame(terms, _read(terms.names))
        self.frames.append(frame)
        return frame

    def pop(self, frame: _Frame) -> None:
        """Ends this frame, and what an interruption left open above it."""
        del self.frames[self.frames.index(frame) :]
        try:
            if frame.terms.took is not None:
                frame.terms.took(_read(frame.terms.names))
        finally:
            _write(frame.before)

    def part(self) -> None:
        """Whoever is outermost takes what has become of its generators, and all are as they were before it."""
        terms = self.frames[0].terms
        try:
            if terms.took is not None:
                terms.took({**_read(terms.names), **self.before(1)})
        finally:
            _write(self.before())

    def resume(self, states: States) -> None:
        """Goes on with these after others were inside; what the process's own are by now, they will be afterwards."""
        seen: set[str] = set()
        for frame in self.frames:
            frame.before |= _read(frame.before.keys() - seen)
            seen |= frame.before.keys()
        _write(states)


class _Turns:
    """One owner of the process's generators at a time, in the order in which they asked."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()
        self._owner: _Turn | None = None
        self._count = 0  # how often somebody went inside

    @property
    def mine(self) -> _Turn | None:
        """The turn of the calling thread."""
        owner = self._owner
        return owner if owner is not None and threading.get_ident() in owner.idents else None

    @property
    def calm(self) -> int | None:
        """A number that stays the same until somebody goes inside; None while somebody is."""
        return self._count if self._owner is None else None

    def is_owner(self, turn: _Turn) -> bool:
        return self._owner is turn

    def own(self) -> dict[str, Any]:
        """What the generators are while nobody is inside; for whoever is."""
        owner = self._owner
        return {**_read(_STATES), **(owner.before() if owner is not None else {})}

    def take(self, turn: _Turn) -> bool:
        """Waits for its turn. True where it could not wait longer for a source that draws and is in the middle of a batch."""
        is_late, looks, seen = False, 0, None
        with self._changed:
            self._asked.append(turn)
            try:
                while not self._is_next(turn):
                    is_first, owner = self._asked[0] is turn, self._owner
                    # a source too: two of them may wait for each other
                    slow = owner if is_first and owner is not None and owner.reads() else None
                    looks, seen = (looks if slow is seen else 0), slow
                    if self._changed.wait(_PATIENCE_S / _LOOKS if slow else None) or self._owner is not slow:
                        continue
                    looks += 1
                    if looks == _LOOKS:
                        is_late = self._displaced(slow)
            finally:  # also where Ctrl-C ends the waiting: those behind it look again
                self._asked.remove(turn)
                self._changed.notify_all()
            self._owner = turn
            self._count += 1
        return is_late

    def _is_next(self, turn: _Turn) -> bool:
        return self._owner is None and self._asked[0] is turn

    def _displaced(self, slow: _Turn | None) -> bool:
        """Whether the owner, whose turn ends here, has drawn; what it draws from now on is nobody's."""
        self._owner = None
        if slow is None or not slow.frames:
            return False
        drew = slow.terms.drew is not None and (len(slow.frames) > 1 or slow.terms.drew())
        slow.part()
        return drew

    def give(self, turn: _Turn) -> None:
        """The turn is over, unless another has not waited for its end."""
        with self._changed:
            if self._owner is turn:
                self._owner = None
                self._changed.notify_all()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Others may go inside while the owner waits for them."""
        mine = self.mine
        if mine is None:
            yield
            return
        states = _read(mine.before())
        _write(mine.before())
        self.give(mine)
        try:
            yield
        finally:
            self.take(mine)
            mine.resume(states)


_turns = _Turns()
_SLOW = (
    "carpool: a data source that draws from the process's random generators has been in the middle of a batch for "
    f"{_PATIENCE_S:.0f} s, and others go on without it; what it draws in this batch may disturb them. Give it a generator "
    "of its own: torch.Generator(), numpy.random.default_rng(seed)"
)


aside = _turns.aside


@contextmanager
def _inside(terms: _Terms) -> Iterator[_Turn]:
    mine = _turns.mine
    if mine is not None:
        with _framed(mine, terms):
            yield mine
        return
    turn = _Turn(terms)
    try:
        if _turns.take(turn):
            warnings.warn(_SLOW, stacklevel=4)
        with _framed(turn, terms):
            yield turn
    finally:
        _turns.give(turn)


@contextmanager
def _framed(turn: _Turn, terms: _Terms) -> Iterator[None]:
    frame, idents = turn.push(terms), turn.idents
    try:
        terms.put()
        yield
    finally:
        turn.idents = idents
        if _turns.is_owner(turn):  # else others did not wait for its end, and its generators are theirs
            turn.pop(frame)


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
    chosen = tuple(_STATES if names is None else names)
    with _inside(_Terms(chosen, lambda: reseed(seed, chosen))):
        yield


def reseed(seed: int, names: Iterable[str] | None = None) -> None:
    """Seeds the process's generators, or those of these modules; for whoever is inside."""
    for name in _STATES if names is None else names:
        if _STATES[name].here():
            _STATES[name].seed(seed)


@contextmanager
def kept() -> Iterator[None]:
    """The process's own generators inside, whoever's turn it is, and afterwards as they were."""
    with _inside(_Terms(_STATES, lambda: _write(_turns.own()))):
        yield


class Ambient:
    """The generators of someone who draws, waits and goes on drawing, from a seed on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: dict[str, Any] = {}

    @contextmanager
    def inside(self, ident: int | None = None) -> Iterator[None]:
        """Its own states inside, everybody else's outside. `ident` is a thread that works for this one meanwhile."""
        with _inside(_Terms(_STATES, self._put, self._took)) as turn:
            if ident is not None:
                turn.idents |= {ident}
            yield

    def _put(self) -> None:
        _write(self._states)
        reseed(self._seed, [name for name in _STATES if name not in self._states])

    def _took(self, states: States) -> None:
        self._states = dict(states)


class Reading:
    """The generators of a source that is read in a thread: at first as the process's were when the source was opened.

    A source that draws nothing waits for nobody. Whether it draws is seen: its first batches, and the first of each pass, are
    read while nobody else is inside. Once it has drawn, all are.
    """

    def __init__(self) -> None:
        self._draws = False
        self._clean = 0
        self._marks: list[Any] = []
        with _inside(_Terms()):
            self._states = _turns.own()

    @contextmanager
    def batch(self, begins: bool = False) -> Iterator[None]:
        """While the source's own code runs; `begins` at the beginning of a pass."""
        if begins or self._draws or self._clean < _CLEAN:
            with _inside(_Terms(_STATES, self._put, self._took, self._drew)):
                yield
            return
        before, calm = _marks(), _turns.calm
        yield
        # where others were inside meanwhile, nobody knows who drew
        self._draws = _marks() != before and calm is not None and _turns.calm == calm

    def _put(self) -> None:
        _write(self._states)
        self._marks = _marks()

    def _drew(self) -> bool:
        return _marks() != self._marks

    def _took(self, states: States) -> None:
        self._draws |= self._drew()
        self._clean += 1
        self._states = dict(states)


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
        torch = sys.modules.get("torch")
        return hasattr(torch, "default_generator") and hasattr(
            torch, "cuda"
        )  # not while it is being imported

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
        host, cuda = self.read()
        return [state.numpy().tobytes() for state in (host, *cuda)]

    def write(self, state: Any) -> None:
        torch = sys.modules["torch"]
        host, cuda = state
        torch.set_rng_state(host)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class _TensorFlow(_State):
    """TensorFlow's seed of eager operations, and the generator that gives each operation its own.

    An operation's kernel is kept, and goes on from where its last draw under the same two seeds ended. So kernels are forgotten
    where numbers are drawn under a seed from another place than where the last draws under it ended: rarely, since it takes a
    millisecond for each to be made anew.
    """

    module = "tensorflow"

    def __init__(self) -> None:
        self._left: dict[int, Any] = {}  # by seed, where its last draws ended

    def here(self) -> bool:
        return self._context() is not None

    def seed(self, seed: int) -> None:
        rng = random.Random(seed % 2**31)
        self.write((seed % 2**31, rng, rng.getstate()))

    def read(self) -> Any:
        context: Any = self._context()
        rng = getattr(context, "_rng", None)
        return context._seed, rng, rng.getstate() if rng is not None else None

    def mark(self) -> Any:
        seed, _, held = self.read()
        return seed, held

    def write(self, state: Any) -> None:
        context: Any = self._context()
        present, _, left = self.read()
        if left is not None:
            self._left[present] = left
        context._seed, rng, held = state
        if rng is None:
            vars(context).pop("_rng", None)
            return
        rng.setstate(held)
        context._rng = rng
        if self._left.get(context._seed, held) != held or len(self._left) > _MOST_SEEDS:
            context.clear_kernel_cache()
            self._left = {}

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
