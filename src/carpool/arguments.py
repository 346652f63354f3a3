"""Arguments looked at before anything runs: each by its type and its range, in one place for every public function.

NumPy's numbers are as welcome as Python's, and so are arrays without dimensions. A bool is not a number, and a number not a bool.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from carpool.errors import CarpoolError, OptionError, meant, sentence, shown

P = ParamSpec("P")
T = TypeVar("T")

MOST = (1 << 63) - 1
"""The largest count: what an array can be indexed by."""
_MOST_SECONDS = threading.TIMEOUT_MAX  # what a wait can be told


@dataclass(frozen=True)
class Arguments:
    """Whose arguments they are, as the message begins, and what a wrong one raises.

    >>> Arguments(about="Job 'a': ").whole("epochs", 3.0, "pass epochs=3", least=1)
    Traceback (most recent call last):
    carpool.errors.OptionError: Job 'a': Expected epochs of at least 1. Received: 3.0. Remedy: pass epochs=3.
    """

    error: type[CarpoolError] = OptionError
    about: str = ""

    def wrong(self, expected: str, received: str, remedy: str) -> CarpoolError:
        """The error, to be raised."""
        return self.error(self.about + sentence(expected, received, remedy))

    def whole(
        self, name: str, value: Any, remedy: str, least: int | None = None, most: int | None = None
    ) -> int:
        """A whole number as a plain one."""
        found = _plain(value)
        is_whole = _is_a(found, Integral)
        if is_whole and (least is None or found >= least) and (most is None or found <= most):
            return int(found)
        expected = f"{name} that is a whole number" if least is None else f"{name} of at least {least}"
        if most is not None and is_whole and found > most:
            expected = f"{name} of at most {most}"
        raise self.wrong(expected, shown(value), remedy)

    def number(
        self,
        name: str,
        value: Any,
        remedy: str,
        above: float | None = None,
        least: float | None = None,
        is_finite: bool = False,
    ) -> float:
        """A number that is not NaN, as a plain one."""
        found = _plain(value)
        is_number = _is_a(found, Real) and not math.isnan(found)
        is_within = is_number and (above is None or found > above) and (least is None or found >= least)
        if is_within and is_finite and math.isinf(found):
            raise self.wrong(f"{name} that is finite", shown(value), remedy)
        if is_within:
            return found if isinstance(found, int | float) else float(found)
        expected = f"{name} above {above:g}" if above is not None else f"{name} of at least {least or 0:g}"
        raise self.wrong(expected, shown(value), remedy)

    def seconds(self, name: str, value: Any) -> float | None:
        """How long to wait; None for as long as it takes."""
        if value is None:
            return None
        found = self.number(f"a {name}", value, "pass seconds, or None", above=0)
        if found > _MOST_SECONDS:
            raise self.wrong(
                f"a {name} of at most {_MOST_SECONDS:g}", shown(value), "pass None to wait for ever"
            )
        return found

    def share(self, name: str, value: Any, remedy: str) -> float | None:
        """A part of a whole; None where nothing is said."""
        if value is None:
            return None
        found = _plain(value)
        if _is_a(found, Real) and 0 < found <= 1:
            return found if isinstance(found, int | float) else float(found)
        raise self.wrong(f"a {name} above 0 and up to 1", shown(value), remedy)

    def flag(self, name: str, value: Any) -> bool:
        """True or False, and nothing that is only like them."""
        found = _plain(value)
        if not isinstance(found, bool):
            raise self.wrong(f"{name}=True or {name}=False", shown(value), "pass one of the two")
        return found

    def choice(self, name: str, value: Any, known: Sequence[str], remedy: str = "") -> str:
        """One of some words."""
        if isinstance(value, str) and value in known:
            return value
        wanted = meant(value, known) or remedy or "pass one of these"
        raise self.wrong(f"{name} out of {', '.join(known)}", shown(value), wanted)

    def text(self, name: str, value: Any, remedy: str) -> str:
        """Text that is not blank."""
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, shown(value), remedy)
        return value

    def function(self, name: str, value: Any, remedy: str = "pass a callable") -> Any:
        """Something that can be called."""
        if not callable(value):
            raise self.wrong(f"{name} to be a function", shown(value), remedy)
        return value

    def path(self, name: str, value: Any, remedy: str) -> Path:
        """Where a file or a folder is."""
        if isinstance(value, PathLike) or (isinstance(value, str) and value.strip()):
            return Path(value)
        raise self.wrong(f"{name} as a path", shown(value), remedy)

    def mapping(self, name: str, value: Any, remedy: str) -> Mapping[str, Any]:
        """Values by their names."""
        if not isinstance(value, Mapping):
            raise self.wrong(f"{name} as a dict of values by name", shown(value), remedy)
        stray = next((key for key in value if not isinstance(key, str)), None)
        if stray is not None:
            raise self.wrong(f"names in {name} that are text", shown(stray), remedy)
        return value

    def listed(self, name: str, value: Any, remedy: str) -> list[Any]:
        """Several things in an order: no text, no dict, and nothing that cannot be gone through."""
        if isinstance(value, str | bytes | Mapping | set | frozenset) or not _is_iterable(value):
            raise self.wrong(f"{name} as a list", shown(value), remedy)
        return list(value)

    def place(self, value: Any, count: int, remedy: str) -> int:
        """A position among so many, from the end on where it is negative."""
        found = _plain(value)
        if not _is_a(found, Integral):
            raise TypeError(self.about + sentence("a position, a whole number", shown(value), remedy))
        if not -count <= found < count:
            raise IndexError(self.about + sentence(f"a position below {count}", shown(value), remedy))
        return int(found) % count


def missing(function: Any, *arguments: Any) -> list[str] | None:
    """The arguments that a function still wants beside these; None where it takes them, or does not say.

    >>> missing(lambda optimizer, step_size, gamma=0.1: 0, "optimizer"), missing(print), missing(lambda: 0, 1)
    (['step_size'], None, [])
    """
    form = _form(function)
    if form is not None and _takes(*form, len(arguments)):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        given = signature.bind_partial(*arguments[: _most_positional(signature)]).arguments
        return [name for name, one in signature.parameters.items() if name not in given and _is_needed(one)]
    return None


def _form(function: Any) -> tuple[Any, int, frozenset[str]] | None:
    """What a partial function, of which a sweep makes one for each job, can be called with: its function, and what it fills in."""
    if type(function) is not functools.partial or not isinstance(function.func, FunctionType | type):
        return None
    return function.func, len(function.args), frozenset(function.keywords)


@functools.lru_cache(maxsize=256)
def _takes(function: Any, positional: int, keywords: frozenset[str], count: int) -> bool:
    """Whether a partial function that fills so much in can be called with so many arguments beside it."""
    try:
        filled = functools.partial(function, *[None] * positional, **dict.fromkeys(keywords))
        inspect.signature(filled).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


def hinted(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which says what was meant where it is called with an argument that it does not have.

    >>> hinted(lambda batch_size=1: batch_size)(batchsize=2)
    Traceback (most recent call last):
    carpool.errors.OptionError: Expected an argument of <lambda>. Received: batchsize=. Remedy: did you mean 'batch_size='?
    """
    parameters = inspect.signature(function).parameters
    known = [f"{name}=" for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY or _is_word(one)]
    word = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        stray = next((name for name in kwargs if name not in parameters), None)
        if stray is not None:
            remedy = meant(f"{stray}=", known) or f"its arguments are {', '.join(known)}"
            raise OptionError(sentence(f"an argument of {word}", f"{stray}=", remedy))
        return function(*args, **kwargs)

    return called


def _is_a(value: Any, kind: type) -> bool:
    """Whether it is such a number; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Python's own number of a NumPy scalar, or of an array without dimensions."""
    if getattr(value, "shape", None) != ():
        return value
    told = getattr(value, "item", None) or getattr(value, "numpy", None)  # an eager tensor of TensorFlow
    return _plain(told()) if callable(told) else value


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _is_needed(parameter: inspect.Parameter) -> bool:
    varies = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not varies


def _is_word(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"


def _most_positional(signature: inspect.Signature) -> int:
    kinds = [one.kind for one in signature.parameters.values()]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in positional for kind in kinds)
