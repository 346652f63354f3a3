"""A hashable that says what a Python value is and does: equal fingerprints mean equal behaviour.

Plain values, containers, NumPy arrays, functions, classes and ordinary objects are compared by content. A framework's
own objects are left to `special` (carpool.adapters.torch.signature has one). What can't be compared is unequal:
`Identity` equals only itself, and keeps its object alive because fingerprints are keys of a process-wide cache and
the id of a dead object is given out again.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np

from carpool.marks import Code, Identity, Made, Parts, Plain

Special = Callable[[Any], Any]

LARGEST_DIGEST_BYTES = 16 * 2**20
"""An array above this is compared by identity: a dataset captured by a thousand losses is not read a thousand times."""

_LARGEST_WALK = 10_000  # an attribute that reaches a trainer or a whole application is compared by identity
_BY_VALUE = frozenset({type(None), bool, int, str, bytes, type(Ellipsis)})
_BY_REPR = frozenset({float, complex, range})  # repr tells 0.0 from -0.0 and makes NaN equal to NaN
_NamedField = type(vars(namedtuple("_NamedTuple", "a"))["a"])  # what reads a field of a namedtuple
_HEAP_TYPE, _MANAGED_DICT = 1 << 9, 1 << 4  # bits of type.__flags__
_POINTER_BYTES = tuple.__itemsize__
_NOT_BEHAVIOUR = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl"})
_NOT_BEHAVIOUR_EITHER = ("__annot", "__firstlineno", "__static_attributes")  # from newer Pythons, by prefix


def fingerprint(value: Any, special: Special | None = None) -> Hashable:
    """What `value` is and does, as a hashable; `special` answers for a framework's objects or returns NotImplemented.

    >>> fingerprint(0.1)
    0.1
    >>> fingerprint(1) == fingerprint(1.0)
    False
    >>> scaled = lambda by: lambda x: x * by
    >>> fingerprint(scaled(2)) == fingerprint(scaled(2)), fingerprint(scaled(2)) == fingerprint(scaled(3))
    (True, False)
    """
    try:
        return Walk(special).of(value)
    except (_TooLarge, RecursionError):
        return Identity(value)


def digest(data: Any) -> str:
    """A short text that stands for the bytes of a contiguous buffer."""
    return blake2b(data, digest_size=16).hexdigest()


class _TooLarge(Exception):
    """The value reaches more objects than is worth comparing."""


class Walk:
    """One value's fingerprint in the making.

    Whatever may be part of a cycle gets a number when first met, and is its number from then on: cycles end, the work
    is linear, and [a, a] differs from [a, copy(a)].
    """

    def __init__(self, special: Special | None) -> None:
        self.special = special
        self.seen: dict[int, tuple[int, Any]] = {}
        self.visits = 0

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _BY_VALUE:
            return Plain(kind, value)
        if kind in _BY_REPR:
            return Plain(kind, repr(value))
        if (handler := _HANDLERS.get(kind)) is not None:
            return handler(self, value)
        if self.special is not None and (found := self.special(value)) is not NotImplemented:
            self.visits += 1
            return found
        return _other(self, value)

    def once(self, value: Any, kind: Hashable, parts: Callable[[Walk, Any], Parts]) -> Hashable:
        """The value made of its parts, or its number when it was met before."""
        self.visits += 1
        if self.visits > _LARGEST_WALK:
            raise _TooLarge
        if (known := self.seen.get(id(value))) is not None:
            return Made("seen", (known[0],))
        self.seen[id(value)] = (len(self.seen), value)
        return Made(kind, parts(self, value))

    def named(self, values: dict[str, Any] | Iterable[tuple[str, Any]], word: str = "") -> Parts:
        pairs = values.items() if isinstance(values, dict) else values
        return tuple((f"{word}{name}", self.of(value)) for name, value in pairs)


# Containers


def _listed(walk: Walk, value: Iterable[Any]) -> Parts:
    return tuple(walk.of(item) for item in value)


def _paired(walk: Walk, items: Iterable[tuple[Any, Any]]) -> Parts:
    return tuple((walk.of(key), walk.of(item)) for key, item in items)


def _counted(walk: Walk, value: Any, items: Iterable[Any]) -> Parts:
    before = walk.visits
    counts = Counter(_listed(walk, items))
    # The order of a set of objects hangs on their addresses, and so would the numbers given to them.
    return (frozenset(counts.items()),) if walk.visits == before else (Identity(value),)


# The own methods of the container, so that a subclass's overridden iteration is not run.
_CONTENTS: dict[type, Callable[[Walk, Any], Parts]] = {
    list: lambda walk, value: _listed(walk, list.__iter__(value)),
    tuple: lambda walk, value: _listed(walk, tuple.__iter__(value)),
    dict: lambda walk, value: _paired(walk, dict.items(value)),
    OrderedDict: lambda walk, value: _paired(walk, OrderedDict.items(value)),
    set: lambda walk, value: _counted(walk, value, set.__iter__(value)),
    frozenset: lambda walk, value: _counted(walk, value, frozenset.__iter__(value)),
}


def _container(walk: Walk, value: Any) -> Hashable:
    kind = type(value)
    if kind in (tuple, frozenset):  # immutable: whether two of them are one object does not matter
        return Made(kind.__name__, _CONTENTS[kind](walk, value))
    if kind is set:  # its elements must stay without numbers, and so it has none itself
        return Made("set", _CONTENTS[set](walk, value))
    return walk.once(value, kind.__name__, _CONTENTS[kind])


def _defaultdict(walk: Walk, value: defaultdict[Any, Any]) -> Parts:
    return (walk.of(value.default_factory), *_paired(walk, value.items()))


def _deque(walk: Walk, value: deque[Any]) -> Parts:
    return (walk.of(value.maxlen), *_listed(walk, value))


def _proxied(walk: Walk, value: types.MappingProxyType[Any, Any]) -> Parts:
    return _paired(walk, value.items())


def _array(walk: Walk, value: np.ndarray[Any, Any]) -> Hashable:
    kind = f"{value.shape} {value.dtype} array"
    if value.dtype == object:
        return walk.once(value, kind, lambda walk, value: _listed(walk, value.ravel().tolist()))
    if value.dtype.hasobject or value.nbytes > LARGEST_DIGEST_BYTES:
        return Identity(value)
    return Made(kind, (digest(value.tobytes()),))


def _scalar(walk: Walk, value: np.generic) -> Hashable:
    shown = value.dtype.kind in "biufcSU"
    return Plain(type(value), repr(value)) if shown else _array(walk, np.asarray(value))


# Functions


def _importable(value: Any) -> bool:
    """Whether the very object is found under its module and name.

    Never in __main__: there a cell can be run again with another constant while the functions that read it stay.
    """
    module, name = getattr(value, "__module__", None), value.__qualname__
    if module == "__main__" or "<" in name or not isinstance(module, str):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
    return found is value


def _function(walk: Walk, value: types.FunctionType) -> Hashable:
    return (
        _known(walk, value, [value]) if _importable(value) else walk.once(value, "function", _function_parts)
    )


def _known(walk: Walk, value: Any, functions: Iterable[Any]) -> Hashable:
    """Something importable is itself, and beside it the settings its functions read: those may be edited between runs."""
    if _installed(value.__module__):
        return Identity(value)
    settings = {
        f"global {name}": walk.of(function.__globals__[name])
        for function in functions
        for name in _names(function.__code__)
        if name in function.__globals__ and _is_setting(function.__globals__[name])
    }
    return Made(Identity(value), tuple(sorted(settings.items()))) if settings else Identity(value)


@functools.cache
def _installed(module: str) -> bool:
    """Whether a module is Python's own or an installed package's: nobody edits their globals."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _function_parts(walk: Walk, function: Any) -> Parts:
    code: types.CodeType = function.__code__
    defaults = function.__defaults__ or ()
    with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return (
        ("code", _code(walk, code)),
        *walk.named(zip_longest(with_default, defaults, fillvalue=""), "default "),
        *walk.named(function.__kwdefaults__ or {}, "keyword default "),
        *walk.named(zip(code.co_freevars, function.__closure__ or (), strict=True), "captured "),
        *_globals(walk, function),
        *walk.named(vars(function), "attribute "),
    )


def _code(walk: Walk, code: types.CodeType) -> Code:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    # Since Python 3.11 what a `try` covers is in the exception table, not in the instructions.
    return Code((code.co_code, code.co_exceptiontable, counts, names, _listed(walk, code.co_consts)))


def _globals(walk: Walk, function: Any) -> Iterator[tuple[str, Hashable]]:
    scope = function.__globals__
    for name in dict.fromkeys(_names(function.__code__)):
        if name in scope:
            value = scope[name]
            followed = issubclass(type(value), types.FunctionType | type) or _is_setting(value)
            yield f"global {name}", walk.of(value) if followed else Identity(value)


def _is_setting(value: Any) -> bool:
    """Whether a global holds nothing but plain values: a constant, or a config that may be edited between two runs."""
    kind = type(value)
    if kind in _BY_VALUE or kind in _BY_REPR:
        return True
    if kind in (dict, OrderedDict):
        return all(_is_setting(key) and _is_setting(item) for key, item in value.items())
    if kind in _CONTENTS:
        return all(map(_is_setting, value))
    return _python_base(kind) is object and all(map(_is_setting, _attributes(value).values()))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names(constant)


def _cell(walk: Walk, cell: types.CellType) -> Hashable:
    try:
        contents = cell.cell_contents
    except ValueError:
        return Made("empty", ())
    return walk.of(contents)


def _partial(walk: Walk, value: functools.partial[Any]) -> Parts:
    return (
        ("function", walk.of(value.func)),
        *walk.named(((str(i), item) for i, item in enumerate(value.args)), "position "),
        *walk.named(value.keywords, "argument "),
        *walk.named(vars(value), "attribute "),
    )


def _method(walk: Walk, value: types.MethodType) -> Hashable:
    return Made("method", (("function", walk.of(value.__func__)), ("self", walk.of(value.__self__))))


# Classes and objects


def _class(walk: Walk, value: type) -> Hashable:
    if not value.__flags__ & _HEAP_TYPE:
        return Identity(value)
    if _importable(value):
        return _known(
            walk, value, [own for own in vars(value).values() if isinstance(own, types.FunctionType)]
        )
    return walk.once(value, f"class {value.__qualname__}", _class_parts)


def _class_parts(walk: Walk, value: Any) -> Parts:
    own = [pair for pair in vars(value).items() if pair[0] not in _NOT_BEHAVIOUR]
    own = [pair for pair in own if not pair[0].startswith(_NOT_BEHAVIOUR_EITHER)]
    return (("metaclass", walk.of(type(value))), ("bases", walk.of(value.__bases__)), *walk.named(own))


def _other(walk: Walk, value: Any) -> Hashable:
    kind = type(value)
    if issubclass(kind, Enum):
        return Made(walk.of(kind), (value._name_, walk.of(value._value_)))
    if issubclass(kind, type):
        return _class(walk, value)
    if issubclass(kind, np.generic):
        return _scalar(walk, value)
    return _object(walk, value)


def _object(walk: Walk, value: Any) -> Hashable:
    kind = type(value)
    base = _python_base(kind)
    if base is None or kind is object:  # an object() is a sentinel: it is told by `is`
        return Identity(value)
    shape = walk.of(kind)
    if base in (tuple, frozenset):
        return Made(shape, _object_parts(walk, value, base))
    return walk.once(value, shape, lambda walk, value: _object_parts(walk, value, base))


def _object_parts(walk: Walk, value: Any, base: type) -> Parts:
    contents = () if base is object else (("contents", Made(base.__name__, _CONTENTS[base](walk, value))),)
    attributes = sorted(_attributes(value).items(), key=lambda pair: str(pair[0]))
    return (*contents, *walk.named(attributes), *walk.named(_filled_slots(value), "slot "))


def _attributes(value: Any) -> dict[str, Any]:
    return object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {}


@functools.lru_cache(maxsize=4096)
def _python_base(kind: type) -> type | None:
    """The built-in that a class made by Python code extends; None when an instance may hold state that C code hides.

    The arithmetic is the one by which CPython decides that an object can't be pickled.
    """
    built_in = [c for c in kind.__mro__ if not c.__flags__ & _HEAP_TYPE and c is not object]
    base = built_in[0] if built_in else object
    known = base is object or (base in _CONTENTS and built_in == list(base.__mro__[:-1]))
    visible = _visible_bytes(kind, base) >= kind.__basicsize__ and kind.__itemsize__ == base.__itemsize__
    return base if known and visible else None


def _visible_bytes(kind: type, base: type) -> int:
    own_dict = kind.__dictoffset__ and not base.__dictoffset__ and not kind.__flags__ & _MANAGED_DICT
    own_weakrefs = kind.__weakrefoffset__ > 0 and not base.__weakrefoffset__
    return base.__basicsize__ + _POINTER_BYTES * (len(list(_slots(kind))) + bool(own_dict) + own_weakrefs)


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for cls in kind.__mro__:
        for name, item in vars(cls).items():
            if type(item) is types.MemberDescriptorType:
                yield f"{cls.__qualname__}.{name}", item


def _filled_slots(value: Any) -> Iterator[tuple[str, Any]]:
    for name, slot in _slots(type(value)):
        try:
            yield name, slot.__get__(value)
        except AttributeError:
            continue


def _slot(walk: Walk, value: types.MemberDescriptorType) -> Hashable:
    return Made("slot", (value.__name__, walk.of(value.__objclass__)))


def _built_of(kind: str, *names: str) -> Callable[[Walk, Any], Hashable]:
    """The handler of an immutable thing whose parts are these attributes."""
    return lambda walk, value: Made(kind, tuple(walk.of(getattr(value, name)) for name in names))


_HANDLERS: dict[Any, Callable[[Walk, Any], Hashable]] = {
    **dict.fromkeys(_CONTENTS, _container),
    defaultdict: lambda walk, value: walk.once(value, "defaultdict", _defaultdict),
    deque: lambda walk, value: walk.once(value, "deque", _deque),
    types.MappingProxyType: lambda walk, value: walk.once(value, "mappingproxy", _proxied),
    np.ndarray: _array,
    slice: _built_of("slice", "start", "stop", "step"),
    types.FunctionType: _function,
    types.CodeType: _code,
    types.CellType: _cell,
    types.MethodType: _method,
    functools.partial: lambda walk, value: walk.once(value, "partial", _partial),
    property: _built_of("property", "fget", "fset", "fdel"),
    functools.cached_property: _built_of("cached_property", "func"),
    staticmethod: _built_of("staticmethod", "__func__"),
    classmethod: _built_of("classmethod", "__func__"),
    types.MemberDescriptorType: _slot,
    _NamedField: lambda _, value: Made("field", value.__reduce__()[1]),
    types.ModuleType: _built_of("module", "__name__"),
    types.GenericAlias: _built_of("alias", "__origin__", "__args__"),
    types.UnionType: _built_of("union", "__args__"),
    weakref.ReferenceType: lambda walk, value: Made("weakref", (walk.of(value()),)),
    type: _class,
}
