"""Attempts to fool the fingerprint: each pair that behaves differently must differ, each equal pair must be equal."""

from __future__ import annotations

import copy
import functools
import math
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest

from carpool import fingerprint as module
from carpool.fingerprint import fingerprint
from carpool.marks import Identity, Plain

CONSTANT = 2
CONFIG: dict[str, Any] = {"rate": 0.1}


class Colour(Enum):
    RED = 1
    BLUE = 2


class Level(IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Settings:
    rate: float = 0.1
    names: list[str] = field(default_factory=list)


class Slotted:
    __slots__ = ("__weakref__", "a", "b")

    def __init__(self, a: int) -> None:
        self.a = a


class Bag(dict[str, int]):
    pass


class OrderedBag(OrderedDict[str, int]):
    pass


class Thing:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def act(self, x: int) -> int:
        return x

    @staticmethod
    def alone(x: int) -> int:
        return x

    @classmethod
    def made(cls) -> Thing:
        return cls()


def plain_function(x: int) -> int:
    return x


def same(make: Callable[[], Any]) -> bool:
    first, second = fingerprint(make()), fingerprint(make())
    return first == second and hash(first) == hash(second) and {first: 1}[second] == 1


VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 1,
    lambda: 1.0,
    lambda: 1 + 0j,
    lambda: "1",
    lambda: b"1",
    lambda: 0.0,
    lambda: -0.0,
    lambda: float("nan"),
    lambda: ...,
    lambda: range(3),
    lambda: range(0, 3, 2),
    lambda: slice(1, None),
    lambda: Colour.RED,
    lambda: Colour.BLUE,
    lambda: Level.LOW,
    lambda: [1, 2],
    lambda: [2, 1],
    lambda: [True, 2],
    lambda: (1, 2),
    lambda: Point(1, 2),
    lambda: {1, 2},
    lambda: {1.0, 2},
    lambda: frozenset({1, 2}),
    lambda: {"a": 1, "b": 2},
    lambda: {"b": 2, "a": 1},
    lambda: OrderedDict(a=1, b=2),
    lambda: defaultdict(list, a=1),
    lambda: defaultdict(dict, a=1),
    lambda: deque([1, 2]),
    lambda: deque([1, 2], maxlen=2),
    lambda: Bag(a=1),
    lambda: Bag(a=2),
    lambda: OrderedBag(a=1),
    lambda: Counter("aab"),
    lambda: types.MappingProxyType({"a": 1}),
    lambda: np.float32(1),
    lambda: np.float64(1),
    lambda: np.datetime64("2024-01-01"),
    lambda: np.arange(3),
    lambda: np.arange(3.0),
    lambda: np.arange(6).reshape(2, 3),
    lambda: np.arange(6).reshape(3, 2),
    lambda: np.arange(6).reshape(3, 2).T,
    lambda: np.array([1, "a", None], dtype=object),
    lambda: np.zeros(0),
    lambda: Settings(),
    lambda: Settings(0.2),
    lambda: Slotted(1),
    lambda: Slotted(2),
    lambda: Thing(a=1),
    lambda: Thing(a=1.0),
    lambda: Thing(b=1),
    lambda: Thing(a=1).act,
    lambda: Thing(a=2).act,
    lambda: Thing.made,
    lambda: Thing.alone,
    lambda: plain_function,
    lambda: len,
    lambda: math,
    lambda: int,
    lambda: Thing,
    lambda: list[int],
    lambda: int | None,
    lambda: property(plain_function),
    lambda: staticmethod(plain_function),
    lambda: classmethod(Thing.alone),  # type: ignore[arg-type]
    lambda: functools.cached_property(plain_function),
    lambda: functools.partial(plain_function),
    lambda: functools.partial(plain_function, 1),
    lambda: functools.partial(plain_function, x=1),
    lambda: weakref.ref(Thing),
    lambda: lambda x: x * 2,
    lambda: lambda x: x * 3,
    lambda: lambda x: x * 2.0,
    lambda: lambda y: y * 2,
    lambda: lambda x: (lambda z: z + 1)(x),
    lambda: lambda x: (lambda z: z + 2)(x),
    lambda: lambda x, by=2: x * by,
    lambda: lambda x, by=3: x * by,
    lambda: lambda x, *, by=2: x * by,
    lambda: lambda x: x * CONSTANT,
    lambda: lambda x: x in {1, 2},
    lambda: lambda x: x in {1, 3},
]


@pytest.mark.parametrize("make", VALUES)
def test_made_twice_is_equal(make: Callable[[], Any]) -> None:
    assert same(make)


def test_all_of_them_differ() -> None:
    prints = [fingerprint(make()) for make in VALUES]
    clashes = [(i, j) for j in range(len(prints)) for i in range(j) if prints[i] == prints[j]]
    assert clashes == []
    assert len(set(prints)) == len(VALUES)


def scaled(by: Any) -> Callable[[Any], Any]:
    return lambda x: x * by


def test_closure_values_count() -> None:
    assert same(lambda: scaled(2))
    assert fingerprint(scaled(2)) != fingerprint(scaled(3))
    assert fingerprint(scaled(2)) != fingerprint(scaled(2.0))
    assert fingerprint(scaled(np.arange(3))) != fingerprint(scaled(np.arange(1, 4)))


def test_an_empty_cell_is_not_a_none() -> None:
    def make(fill: bool) -> Callable[[], Any]:
        def inner() -> Any:
            return late

        if fill:
            late = None
        return inner

    assert same(lambda: make(False))
    assert fingerprint(make(False)) != fingerprint(make(True))


def test_an_attribute_is_not_a_default() -> None:
    def with_default() -> Any:
        return lambda x=1: x

    def with_attribute() -> Any:
        function: Any = lambda x: x  # noqa: E731
        function.x = 1
        return function

    assert same(with_attribute)
    assert fingerprint(with_default()) != fingerprint(with_attribute())


def test_what_a_try_covers_counts() -> None:
    def compiled(source: str) -> Any:
        scope: dict[str, Any] = {"__name__": "elsewhere"}
        exec(source, scope)
        return scope["f"]

    both = "def f(x):\n try:\n  a = x\n  b = x\n except E: pass\n return a"
    one = "def f(x):\n try:\n  a = x\n except E: pass\n b = x\n return a"
    assert same(lambda: compiled(both))
    assert fingerprint(compiled(both)) != fingerprint(compiled(one))


def test_global_read_by_a_lambda(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[[], Any] = lambda: CONSTANT  # noqa: E731
    nested: Callable[[], Any] = lambda: [CONSTANT for _ in range(2)]  # noqa: E731
    before = fingerprint(read), fingerprint(nested)
    assert before == (fingerprint(read), fingerprint(nested))
    monkeypatch.setitem(globals(), "CONSTANT", 3)
    assert fingerprint(read) != before[0]
    assert fingerprint(nested) != before[1]


def test_a_config_edited_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[[], Any] = lambda: CONFIG["rate"]  # noqa: E731
    before = fingerprint(read)
    monkeypatch.setitem(CONFIG, "rate", 0.2)
    assert fingerprint(read) != before


def test_a_function_of_main_is_compared_by_what_it_does() -> None:
    def run(constant: int, body: str = "x * SCALE") -> Any:
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(f"SCALE = {constant}\ndef f(x): return {body}\nclass C:\n def g(self, x): return {body}", scope)
        return [scope["f"], scope["C"]]

    assert same(lambda: run(2))
    assert fingerprint(run(2)) != fingerprint(run(3))
    assert fingerprint(run(2)[1]) != fingerprint(run(3)[1])
    assert fingerprint(run(2)) != fingerprint(run(2, "x + SCALE"))


def test_importable_functions_and_classes_are_themselves() -> None:
    assert fingerprint(plain_function) == Identity(plain_function)
    assert fingerprint(Thing) == Identity(Thing)
    assert fingerprint(Thing.act) == Identity(Thing.act)
    assert fingerprint(Thing.alone) == Identity(Thing.alone)


def test_a_redefined_function_is_not_the_importable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = fingerprint(plain_function)
    original = plain_function
    monkeypatch.setitem(globals(), "plain_function", lambda x: x)
    assert fingerprint(original) != old


def local_class(constant: int, base: type = object) -> Any:
    class Local(base):
        rate = 0.1

        def act(self, x: int) -> int:
            return x * constant

        def parent(self) -> Any:
            return super().__repr__()

    return Local


def test_classes_of_one_factory() -> None:
    assert same(lambda: local_class(2))
    assert same(lambda: local_class(2)())
    assert fingerprint(local_class(2)) != fingerprint(local_class(3))
    assert fingerprint(local_class(2)()) != fingerprint(local_class(3)())
    assert fingerprint(local_class(2)) != fingerprint(local_class(2, Thing))


def test_a_class_attribute_set_later() -> None:
    changed = local_class(2)
    changed.rate = 0.2
    assert fingerprint(changed) != fingerprint(local_class(2))


def test_a_local_dataclass_enum_and_namedtuple() -> None:
    def make(default: Any) -> Any:
        @dataclass
        class Local:
            rate: float = default
            names: list[str] = field(default_factory=list)

        class Choice(Enum):
            A = default

        return [Local(), Choice.A, namedtuple("P", "x")(default)]

    assert same(lambda: make(0.1))
    for i in range(3):
        assert fingerprint(make(0.1)[i]) != fingerprint(make(0.2)[i])


def test_slots_of_a_local_class() -> None:
    def make(value: int) -> Any:
        class Local:
            __slots__ = ("a",)

            def __init__(self) -> None:
                self.a = value

        return Local()

    assert same(lambda: make(1))
    assert fingerprint(make(1)) != fingerprint(make(2))


def test_cycles_end() -> None:
    def ring(n: int) -> list[Any]:
        inner: list[Any] = [n]
        inner.append({"back": (inner,)})
        return inner

    def recursive(n: int) -> Callable[[int], int]:
        def f(x: int) -> int:
            return n if x == 0 else f(x - 1)

        return f

    for make in (ring, recursive):
        assert same(lambda make=make: make(1))
        assert fingerprint(make(1)) != fingerprint(make(2))


def test_one_object_twice_is_not_two_objects() -> None:
    one = Thing(a=1)
    assert fingerprint([one, one]) != fingerprint([one, copy.copy(one)])
    assert fingerprint([(1,), (1,)]) == fingerprint([(1,)] * 2)


def test_a_diamond_is_walked_once() -> None:
    def tower() -> Any:
        top: Any = Thing()
        for _ in range(60):
            top = Thing(left=top, right=top)
        return top

    assert same(tower)


def test_sets_count_what_looks_the_same() -> None:
    assert fingerprint({1, 2}) == fingerprint({2, 1})
    assert fingerprint({scaled(2), scaled(2)}) != fingerprint({scaled(2)})
    held = {Thing(), Thing()}
    assert fingerprint(held) == fingerprint(held)
    assert fingerprint(held) != fingerprint({Thing(), Thing()})


@pytest.mark.parametrize(
    "make",
    [object, threading.Lock, lambda: iter([]), lambda: np.random.default_rng(0), lambda: ValueError("a")],
)
def test_what_cannot_be_compared_is_unequal(make: Callable[[], Any]) -> None:
    value, other = make(), make()
    assert fingerprint(value) == fingerprint(value) == Identity(value)
    assert fingerprint(value) != fingerprint(other)
    assert fingerprint(Thing(a=value)) != fingerprint(Thing(a=other))


def test_too_large_or_too_deep_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert fingerprint(deep) == Identity(deep)
    many = [[i] for i in range(20_000)]
    assert fingerprint(many) == Identity(many)
    monkeypatch.setattr(module, "LARGEST_DIGEST_BYTES", 8)
    array = np.arange(3)
    assert fingerprint(array) == Identity(array) != fingerprint(np.arange(3))


def test_identity_keeps_its_object() -> None:
    value = Thing()
    reference = weakref.ref(value)
    kept = Identity(value)
    del value
    assert reference() is kept.value
    with pytest.raises(AttributeError):
        kept.value = None  # type: ignore[misc]


def test_special_is_asked_inside_everything() -> None:
    def special(value: Any) -> Any:
        return Plain(Thing, "a thing") if type(value) is Thing else NotImplemented

    def capture(thing: Any) -> Callable[[], Any]:
        return lambda: thing

    wraps: list[Callable[[Thing], Any]] = [
        lambda thing: [thing],
        lambda thing: {"a": (thing,)},
        lambda thing: capture(thing),
        lambda thing: functools.partial(capture, thing),
    ]
    for wrap in wraps:
        one, two = wrap(Thing(a=[1])), wrap(Thing(a=[2]))
        assert fingerprint(one, special) == fingerprint(two, special)
        assert fingerprint(one) != fingerprint(two)
    assert fingerprint(Slotted(1), special) == fingerprint(Slotted(1))


def test_how_they_read() -> None:
    assert str(fingerprint(0.1)) == "0.1"
    assert str(fingerprint("a")) == "'a'"
    assert str(fingerprint([1, None])) == "list(1, None)"
    assert str(fingerprint({"a": 1})) == "dict('a'=1)"
    assert str(fingerprint(plain_function)) == "plain_function"
    assert str(fingerprint(Thing)) == "Thing"
    assert str(fingerprint(len)) == "len"
    assert str(fingerprint(threading.Lock())) == "lock object"
    assert str(fingerprint(scaled(3))).endswith("captured by=3)")
    assert str(fingerprint(Thing(a=1))) == "Thing(a=1)"
