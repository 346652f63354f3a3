"""How a population begins: its members' keys, and their models and optimizer states made in one program where that can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carpool.adapters.jax import programs
from carpool.adapters.jax.forms import Form, Parts
from carpool.adapters.jax.hyper import Hyper
from carpool.adapters.jax.keys import init_keys, steps_key_of
from carpool.adapters.jax.lift import Traced, traced
from carpool.adapters.jax.member import Member, checked_form, way_of
from carpool.adapters.jax.program import State
from carpool.adapters.jax.rule import Rule
from carpool.adapters.jax.shapes import shown, without
from carpool.errors import ModelError, OptionError, sentence
from carpool.fingerprint import fingerprint


@dataclass(frozen=True)
class Founded:
    """A population before its first step."""

    member: Member
    keys: Any
    """What the keys of each member's steps are folded from."""
    hyper: Hyper
    state: State


def founded(
    init: Callable[[Any], Any], step: Callable[..., Any], optimizer: Any, keys: Any, hyper: Mapping[str, Any]
) -> Founded:
    rule = Rule(optimizer, hyper)
    keys = keys_of(keys)
    numbers = Hyper(hyper, len(keys))
    model = init(keys[0])
    form = checked_form(model)
    parts = form.split(model)
    if not jax.tree.leaves(parts.trained):
        raise ModelError(sentence("a model with parameters", "no floating point array", "return parameters"))
    making = _traced(init, form, parts, keys)
    if making is not None:
        forms, own = (form,), keys
    else:
        forms, own = _one_by_one(init, form, parts, keys)
    member = Member(forms, step, rule)
    state = _begun(member, making, own, numbers, len(keys), fingerprint((init, optimizer)))
    return Founded(member, jax.vmap(steps_key_of)(keys), numbers, state)


def keys_of(keys: Any) -> Any:
    """The keys that members' models are made of, from a count, seeds or keys."""
    if isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        if keys.ndim == 1 and len(keys):
            return keys
        raise _no_keys(f"keys of shape {keys.shape}")
    given = np.asarray(list(keys) if isinstance(keys, range) else keys)
    if given.dtype == np.uint32 and given.ndim == 2 and len(given):
        return jax.random.wrap_key_data(jnp.asarray(given))
    if not np.issubdtype(given.dtype, np.integer) or given.ndim > 1 or not given.size:
        raise _no_keys(f"{given.dtype} of shape {given.shape}")
    if given.ndim == 0 and given < 1:
        raise _no_keys(str(given))
    seeds = range(int(given)) if given.ndim == 0 else given.tolist()
    return init_keys(seeds)


def _no_keys(received: str) -> OptionError:
    remedy = "pass keys=64, keys=[3, 5, 7] or keys=jax.random.split(key, 64)"
    return OptionError(
        sentence("a count of members, their seeds, or an array of keys as keys=", received, remedy)
    )


def _traced(init: Callable[[Any], Any], form: Form, parts: Parts, keys: Any) -> Traced | None:
    """From a key to a model's parts, or None where `init` wants to know the key's numbers."""
    try:
        made = traced(lambda key: form.split(init(key)), jax.ShapeDtypeStruct((), keys.dtype))
        found = jax.tree.unflatten(made.out_tree, made.closed.out_avals)
    except Exception:  # whatever is wrong, making them one by one shows it as the user wrote it
        return None
    return made if shown(found) == shown(parts) else None


def _one_by_one(
    init: Callable[[Any], Any], form: Form, parts: Parts, keys: Any
) -> tuple[tuple[Form, ...], Parts]:
    """The members' forms, as many as differ, and their parts stacked."""
    forms, members = [form], [parts]
    for place in range(1, len(keys)):
        model = init(keys[place])
        own = checked_form(model)
        members.append(own.split(model))
        if shown(members[-1]) != shown(parts):
            differing = sorted({*shown(members[-1])} ^ {*shown(parts)}) or [type(model).__name__]
            received = f"{', '.join(differing[:4])} in only one of members 0 and {place}"
            remedy = "make models that differ in their arrays alone"
            raise ModelError(sentence("members of one structure", received, remedy))
        if own.key != form.key:
            forms.append(own)
    columns = zip(*map(jax.tree.leaves, members), strict=True)
    stack = [jnp.stack(column) for column in columns]
    return tuple(forms), jax.tree.unflatten(jax.tree.structure(parts), stack)


def _begun(
    member: Member, making: Traced | None, own: Any, hyper: Hyper, width: int, behaviour: Any
) -> State:
    """All members' first states, by one program."""
    begun = member.begun(making, without(own, 1), hyper.scalars())
    way = way_of(begun, width)

    def make() -> Any:
        return way.each(lambda own, hyper: begun.run((own, hyper), {}), (0, 0))

    key = ("population begins", begun.text, repr(begun.numbers), behaviour, way.name)
    inputs = (own, hyper.arrays())
    return programs.program(key, make, inputs, donated=False).result()(*inputs)
