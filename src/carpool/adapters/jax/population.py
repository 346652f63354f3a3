"""A population: many models as one set of arrays, stepped by hand. For those who think in arrays instead of jobs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax import programs
from carpool.adapters.jax.forms import Parts
from carpool.adapters.jax.founding import Founded, founded
from carpool.adapters.jax.hyper import Hyper
from carpool.adapters.jax.lift import Traced
from carpool.adapters.jax.member import advance, predict, way_of
from carpool.adapters.jax.shapes import length, shapes, typed, without
from carpool.arguments import Arguments, hinted
from carpool.errors import OptionError, sentence, shown
from carpool.fingerprint import fingerprint


@hinted
def population(
    init: Callable[[Any], Any],
    step: Callable[..., Any],
    optimizer: Any,
    *,
    keys: Any,
    hyper: Mapping[str, Any] | None = None,
) -> Population:
    """As many models as `keys`, each `init(key)`, trained by one program.

    `step(model, batch)`, or `step(model, batch, key)`, returns a loss or a dict with "loss" and other scalars. `optimizer` is
    optax' own, or a function of hyper-parameters; `hyper` has their numbers, one for all members or one for each. `keys` is a
    count (the seeds from 0 on), seeds, or JAX keys.

    >>> import jax, optax
    >>> line = lambda key: {"w": jax.random.normal(key, (3, 1))}
    >>> squares = lambda model, batch: ((batch[0] @ model["w"] - batch[1]) ** 2).mean()
    >>> pop = population(line, squares, lambda lr: optax.sgd(lr), keys=4, hyper={"lr": [0.1, 0.2, 0.3, 0.4]})
    >>> pop.step((np.ones((8, 3)), np.ones((8, 1))))["loss"].shape
    (4,)
    >>> pop.drop(pop.hyper["lr"] > 0.25)
    >>> len(pop), pop[1]["w"].shape
    (2, (3, 1))
    """
    says = Arguments()
    says.function("init", init, "pass a function of a key that returns a model")
    says.function("step", step, "pass a function of (model, batch)")
    numbers = {} if hyper is None else says.mapping("hyper", hyper, 'pass hyper={"lr": [0.1, 0.2]}')
    return Population(founded(init, step, optimizer, keys, numbers))


class Population:
    """N members. What a step returns are JAX arrays (N,), on their way: nothing waits for the device but your reading them."""

    hyper: Hyper
    """Hyper-parameters by name, each (N,); assigned between steps, `pop.hyper["lr"] = rates`, without compiling anything."""

    def __init__(self, begun: Founded) -> None:
        self.hyper = begun.hyper
        self._member, self._state = begun.member, begun.state
        self._keys = begun.keys
        self._sound = jnp.ones(len(begun.keys), bool)
        self._running = np.ones(len(begun.keys), bool)
        self._number = 0
        self._behaviour = fingerprint((self._member.step, self._member.rule.optimizer))
        self._traces: dict[Hashable, Traced] = {}
        self._programs: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._running)

    # Training

    @property
    def sound(self) -> Any:
        """Whose losses were finite so far, (N,). The others keep their last sound state and take no more steps."""
        return self._sound

    def step(self, batch: Any, *, each: bool = False) -> dict[str, Any]:
        """A step of every member on this batch, or with `each` on its own: arrays of a leading axis N. Gives scalars by name, (N,)."""
        return self._advanced(batch, each, many=False)

    def steps(self, batches: Any, *, each: bool = False) -> dict[str, Any]:
        """As many steps as the leading axis is long, in one launch. Gives scalars by name, (steps, N)."""
        return self._advanced(batches, each, many=True)

    def _advanced(self, batch: Any, each: bool, many: bool) -> dict[str, Any]:
        each = Arguments().flag("each", each)
        batch = typed(batch)
        count = length(batch, 0, "steps") if many else 1
        if each:
            length(batch, int(many), "members", len(self))
        number = np.uint32(self._number & 0xFFFFFFFF)
        inputs = (self._state, self._sound, batch, self._keys, number, self.hyper.arrays(), self._running)
        key = ("step", each, many, shapes(batch))
        if key not in self._programs:
            self._programs[key] = self._stepping(inputs, batch, each, many)
        self._state, self._sound, shown = self._programs[key](*inputs)
        self._number += count
        return shown

    def _stepping(self, inputs: Any, batch: Any, each: bool, many: bool) -> Any:
        leading = int(each) + int(many)
        own = without(batch, leading)
        member = self._traced(
            ("step", shapes(own)),
            lambda: self._member.stepped(self._one(), own, without(self._keys, 1), self.hyper.scalars()),
        )
        way = way_of(member, len(self))
        key = ("population", each, many, way.name, *self._key(member))
        return programs.program(key, lambda: advance(member, each, many, way), inputs, donated=True).result()

    def predict(self, inputs: Any) -> Any:
        """Every member's predictions for these inputs, (N, ...), in evaluation mode."""
        inputs = typed(inputs)
        given = (self._state, inputs, self._keys)
        key = ("predict", shapes(inputs))
        if key not in self._programs:
            member = self._traced(
                key, lambda: self._member.predicted(self._one(), inputs, without(self._keys, 1))
            )
            way = way_of(member, len(self))
            made = ("population predicts", way.name, *self._key(member))
            self._programs[key] = programs.program(
                made, lambda: predict(member, way), given, donated=False
            ).result()
        return self._programs[key](*given)

    # Members

    def __getitem__(self, place: int) -> Any:
        """A member's model, the kind of object that `init` makes."""
        own = self._own(place)
        return self._member.form.merge(Parts(own.trained, own.rest))

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def optimizer(self, place: int) -> Any:
        """A member's optax state."""
        return self._own(place).optimizer

    def drop(self, members: Any, *, keep_width: bool = False) -> None:
        """These members go: a mask (N,), or places. Those that stay move up, and the next step compiles for the new width.

        With `keep_width` they only stop: they keep their state and show NaN, and nothing compiles.
        """
        gone = self._places(members)
        if Arguments().flag("keep_width", keep_width) or not len(gone):
            self._running[gone] = False
            return
        rows = np.setdiff1d(np.arange(len(self)), gone)
        if not len(rows):
            raise OptionError(sentence("a member to stay", "all to be dropped", "keep one"))
        self._take(rows)
        self._keys, self._programs = self._keys[rows], {}
        self.hyper.keep(rows)

    def copy(self, source: Any, target: Any) -> None:
        """Model and optimizer state of `source` to `target`, places or arrays of them; all are read before any is written.

        A target that had stopped goes on as its source does. Keys and hyper-parameters stay each place's own.
        """
        rows, sources, targets = np.arange(len(self)), self._places(source), self._places(target)
        if len(sources) not in (1, len(targets)) or len(set(targets.tolist())) < len(targets):
            received = f"{sources.tolist()} to {targets.tolist()}"
            raise OptionError(sentence("one source for each target", received, "name every target once"))
        rows[targets] = sources
        self._take(rows)

    def _take(self, rows: np.ndarray) -> None:
        inputs = (self._state, self._sound, rows.astype(np.int32))

        def make() -> Any:
            return lambda state, sound, rows: jax.tree.map(lambda leaf: leaf[rows], (state, sound))

        taken = programs.program("population takes", make, inputs, donated=False).result()
        self._state, self._sound = taken(*inputs)
        self._running = self._running[rows]

    def _own(self, place: int) -> Any:
        row = Arguments().place(place, len(self), f"there are {len(self)} members")
        inputs = (self._state, np.int32(row))

        def make() -> Any:
            return lambda state, row: jax.tree.map(lambda leaf: leaf[row], state)

        return programs.program("population's member", make, inputs, donated=False).result()(*inputs)

    def _places(self, members: Any) -> np.ndarray:
        given = np.asarray(members)
        if given.dtype == bool and given.shape == (len(self),):
            return np.flatnonzero(given)
        places = given.reshape(-1)
        is_whole = np.issubdtype(places.dtype, np.integer) or not len(places)
        if given.ndim > 1 or not is_whole or ((places < -len(self)) | (places >= len(self))).any():
            expected = f"places below {len(self)}, or a mask of that length"
            raise IndexError(sentence(expected, shown(members), f"there are {len(self)} members"))
        return places.astype(np.int64) % len(self)

    # Programs

    def _one(self) -> Any:
        """A member's state in shapes and types."""
        return without(self._state, 1)

    def _traced(self, key: Hashable, make: Callable[[], Traced]) -> Traced:
        if key not in self._traces:
            self._traces[key] = make()
        return self._traces[key]

    def _key(self, member: Traced) -> tuple[Hashable, ...]:
        return member.text, repr(member.numbers), self._behaviour
