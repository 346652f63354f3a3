"""What runs in a worker: `python -m carpool.process FD ASKED` takes calls from the socket FD, one after another, until it closes.

A byte from the socket ASKED asks where its threads are. They are written while Python's lock is held, so that none moves meanwhile:
read from a signal's handler, the stack of a thread that runs has crashed the worker. The signal is for a worker whose lock is held.

Nothing of a framework is imported before the first call says so: whoever started it could set every variable that an import reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from carpool.errors import WorkerError, described, failure, sentence
from carpool.process.messages import Beat, Call, News, Raised, Returned, Started
from carpool.process.wire import Channel, Closed, Frame, round_trip

BEAT_S = 1.0
STACKS_SIGNAL = signal.SIGUSR1
_STDERR = 2
_PREFIXES = ("CUDA_", "XLA_", "TF_", "PYTORCH_", "OMP_", "MKL_", "CARPOOL_")
_FRAMEWORKS = ("torch", "jax", "keras", "tensorflow")

_channel: Channel | None = None
_calling = False


def main(descriptor: int, asked: int) -> int:
    global _channel
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, _STDERR, all_threads=True)
    signal.signal(signal.SIGINT, _interrupt)
    _channel = Channel(socket.socket(fileno=descriptor))
    try:
        _channel.send(Started(os.getpid(), found, imported()))
        threading.Thread(target=_beat, args=(_channel,), daemon=True).start()
        threading.Thread(target=_say_where, args=(socket.socket(fileno=asked),), daemon=True).start()
        while True:
            _answer(_channel, _channel.wait())
    except Closed:
        return 0


def imported() -> tuple[str, ...]:
    """The frameworks that are there already."""
    return tuple(name for name in _FRAMEWORKS if name in sys.modules)


def here() -> bool:
    """Whether this process is a worker."""
    return _channel is not None


def tell(content: Any) -> None:
    """Sends news from inside the function that this worker was given."""
    if _channel is None:
        raise RuntimeError("only a function that runs in a worker can tell news")
    _channel.send(News(content))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C is for the function; between calls, when it has just ended, there is nothing to interrupt."""
    if _calling:
        raise KeyboardInterrupt


def _called(call: Call) -> Any:
    global _calling
    _calling = True
    try:
        return call.function(*call.arguments, **call.keywords)
    finally:
        _calling = False


def _answer(channel: Channel, frame: Frame) -> None:
    try:
        value = _called(frame.decode())
    except Closed:
        raise
    except BaseException as error:  # also what ends a process by itself, such as SystemExit: it is the call's
        channel.send(Raised(portable(error)))
        return
    try:
        channel.send(Returned(value))
    except Closed:
        raise
    except BaseException as error:
        expected = "a worker's function to return what can be pickled"
        why = WorkerError(
            sentence(
                expected, f"a {type(value).__name__} ({described(error)})", "return arrays or plain values"
            )
        )
        channel.send(Raised(why))


def portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, or a WorkerError with its text where it would not arrive as it is."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        same = type(round_trip(error)) is type(error)
    except BaseException as raised:
        failure(raised)
        same = False
    if not same:
        return WorkerError(f"The worker's function raised {described(error)}\n{text}")
    error.add_note(f"In the worker:\n{text}")
    return error


def _beat(channel: Channel) -> None:
    waits = threading.Event()
    while not waits.wait(BEAT_S):
        try:
            channel.send(Beat(rss_bytes(), _device_bytes()))
        except Closed:
            return


def _say_where(asked: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while question := asked.recv(1):
            faulthandler.dump_traceback(_STDERR, all_threads=True)
            asked.send(question)


def rss_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


def _device_bytes() -> int | None:
    """What torch holds on GPUs, where it is used there; it is asked, never imported."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return None
    return sum(cuda.memory_reserved(number) for number in range(cuda.device_count()))
