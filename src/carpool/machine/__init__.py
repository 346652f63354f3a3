"""Machine code of C source, by the machine's own compiler: made once, then read from disk or from memory.

`compilers.py` knows the compilers, `targets.py` the processors, `kept.py` the files. Where there is no machine
code, NoMachineCode says why and what to do; whoever asks goes on without. A failure is
remembered as a library is: one process does not try the same source twice.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import os
import tempfile
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from carpool.errors import described
from carpool.machine import compilers, kept, targets
from carpool.machine.compilers import Compiler, NoMachineCode
from carpool.processor import cores, processor

__all__ = [
    "Compiler", "Made", "NoMachineCode", "begin", "compiler", "is_kept", "is_made", "made",
    "unavailable", "under_way",
    "vector_bytes",
]  # fmt: skip

_FORMAT = 1  # of what is kept: what was kept by another is made anew
_REMEMBERED = (
    256  # sources; a library that is forgotten stays loaded, and is read from disk when it is asked for again
)
_END_S = 5.0  # how long compilers are waited for when the process ends

_Key = tuple[str, str | None, str | None]


@dataclass(frozen=True)
class Made:
    """A loaded library, whose functions run without Python's lock.

    `seconds` is what compiling took: 0 where nothing was compiled.
    """

    library: ctypes.CDLL
    seconds: float
    origin: Literal["made", "disk", "memory"]


def made(source: str) -> Made:
    """The library of a source, compiled here and now if it must be. Raises NoMachineCode.

    >>> made("int answer(void) { return 6 * 7; }").library.answer()
    42
    """
    return _desk(os.getpid()).made(source)


def begin(source: str) -> Future[Made]:
    """The library of a source, or NoMachineCode, in a while: a thread compiles it. It never raises itself."""
    return _desk(os.getpid()).begin(source)


def is_made(source: str) -> bool:
    """Whether the library of a source is there already, so that asking for it takes no time."""
    return _desk(os.getpid()).is_made(source)


def under_way(source: str) -> Future[Made] | None:
    """The library of a source that was asked for and is not there yet."""
    return _desk(os.getpid()).under_way(source)


def is_kept(source: str) -> bool:
    """Whether the library of a source is there or on disk, so that asking for it takes next to no time."""
    return _desk(os.getpid()).is_kept(source)


def compiler() -> Compiler | None:
    """What would compile, if anything."""
    found = _desk(os.getpid()).compiler()
    return found if isinstance(found, Compiler) else None


def unavailable() -> str | None:
    """Why there is no machine code here, and what to install; None where there is."""
    found = _desk(os.getpid()).compiler()
    return None if isinstance(found, Compiler) else found


def vector_bytes() -> int:
    """How wide the vectors of programs should be that are made here: they are compiled for such."""
    return targets.vector_bytes(processor())


@functools.cache
def _desk(process: int) -> _Desk:
    """A process's own: after a fork the parent's threads and locks are not there."""
    return _Desk()


class _Desk:
    """What one process asked for: under way, made, or failed."""

    def __init__(self) -> None:
        self._process = os.getpid()
        tempfile.gettempdir()  # found under a lock, which no fork must find held by a thread that compiles
        self._lock = threading.Lock()
        self._finding = threading.Lock()
        self._asked: OrderedDict[_Key, Future[Made]] = OrderedDict()
        self._waiting: deque[tuple[_Key, Future[Made]]] = deque()
        self._threads = 0
        self._closed = False
        atexit.register(self._close)

    def made(self, source: str) -> Made:
        key = _key(source)
        answer, is_new = self._claim(key)
        is_old = answer.done()
        if is_new:
            self._answer(key, answer)
        if (error := answer.exception()) is not None:
            raise NoMachineCode(str(error))
        return _remembered(answer.result()) if is_old else answer.result()

    def begin(self, source: str) -> Future[Made]:
        key = _key(source)
        answer, is_new = self._claim(key)
        if is_new:
            self._waiting.append((key, answer))
            self._start()
        elif answer.done() and answer.exception() is None:
            again: Future[Made] = Future()
            again.set_result(_remembered(answer.result()))
            return again
        return answer

    def under_way(self, source: str) -> Future[Made] | None:
        with self._lock:
            answer = self._asked.get(_key(source))
        return None if answer is None or answer.done() else answer

    def is_made(self, source: str) -> bool:
        with self._lock:
            answer = self._asked.get(_key(source))
        return answer is not None and answer.done() and answer.exception() is None

    def is_kept(self, source: str) -> bool:
        by = self.compiler()
        if isinstance(by, str):
            return False
        return self.is_made(source) or kept.is_there(_name(source, by, by.flags(processor())))

    def compiler(self) -> Compiler | str:
        with self._finding:  # one asks it for its version, the others wait
            return compilers.find()

    def _claim(self, key: _Key) -> tuple[Future[Made], bool]:
        """What was asked for, and whether it is the caller who must see to it."""
        with self._lock:
            answer, is_new = self._asked.get(key), False
            if answer is None:
                answer, is_new = self._asked.setdefault(key, Future()), True
                answer.set_running_or_notify_cancel()  # others wait for it too: nobody may cancel it
            self._asked.move_to_end(key)
            self._forget_old()
        return answer, is_new

    def _forget_old(self) -> None:
        """But nothing that is under way."""
        many = len(self._asked) - _REMEMBERED
        if many > 0:
            for key in [key for key, answer in self._asked.items() if answer.done()][:many]:
                del self._asked[key]

    def _answer(self, key: _Key, answer: Future[Made]) -> None:
        """Compiles. An interruption is nobody's failure: whoever asks next begins again."""
        try:
            if self._closed:
                raise NoMachineCode("nothing is compiled any more: the program is ending")
            answer.set_result(self._make(key[0]))
        except NoMachineCode as error:
            answer.set_exception(error)
        except Exception as error:
            why = f"a program cannot be compiled ({described(error)})"
            answer.set_exception(NoMachineCode(f"{why}: make room in the temporary folder, or set TMPDIR"))
        except BaseException:
            with self._lock:
                self._asked.pop(key, None)
            answer.set_exception(NoMachineCode("compiling was interrupted: ask again"))
            raise

    def _make(self, source: str) -> Made:
        by = self.compiler()
        if isinstance(by, str):
            raise NoMachineCode(by)
        flags = by.flags(processor())
        name = _name(source, by, flags)
        if (library := kept.load(name)) is not None:
            return Made(library, 0.0, "disk")
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="carpool-", ignore_cleanup_errors=True) as folder:
            file = compilers.compile_in(Path(folder), source, by, flags)
            seconds = time.perf_counter() - begun
            return Made(_load(name, file, by), seconds, "made")

    def _start(self) -> None:
        """A thread for what waits, where there are not as many as processors."""
        with self._lock:
            if self._threads >= cores():
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name="carpool-machine", daemon=True).start()
        except RuntimeError as error:  # no thread can be started any more
            self._give_up(f"no thread can be started to compile in ({error}): end some, or raise ulimit -u")

    def _give_up(self, why: str) -> None:
        """What waits fails, unless a thread is left that will come to it; whoever asks again begins again."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
            left = list(self._waiting)
            self._waiting.clear()
            for key, _ in left:
                self._asked.pop(key, None)
        for _, answer in left:
            answer.set_exception(NoMachineCode(why))

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                key, answer = self._waiting.popleft()
            self._answer(key, answer)

    def _close(self) -> None:
        """The process ends: compilers end with it, and their folders go."""
        if os.getpid() != self._process:
            return
        self._closed = True
        compilers.kill_all()
        with self._lock:
            under_way = [answer for answer in self._asked.values() if not answer.done()]
        wait(under_way, _END_S)


def _load(name: str, file: Path, by: Compiler) -> ctypes.CDLL:
    """From the cache's folder; from the temporary one where nothing is kept, or nothing may run from it."""
    stays = kept.keep(name, file.read_bytes())
    try:
        if stays is not None:
            try:
                return ctypes.CDLL(str(stays))
            except OSError:
                kept.forget(stays)
        return ctypes.CDLL(str(file))  # it stays loaded when its file is gone
    except OSError as error:
        raise compilers.unloadable(by, error) from None
    finally:
        kept.trim()


def _remembered(answer: Made) -> Made:
    return replace(answer, seconds=0.0, origin="memory")


def _key(source: str) -> _Key:
    """Another compiler may succeed where one failed."""
    return source, os.environ.get("CC"), os.environ.get("PATH")


def _name(source: str, by: Compiler, flags: tuple[str, ...]) -> str:
    """Of all that a program depends on."""
    here = processor()
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    about = [_FORMAT, source, by.command, flags, by.version, here.kind, here.model, sorted(here.flags), libc]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
