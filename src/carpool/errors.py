"""Everything carpool raises.

CarpoolError
├── JobError            a job that cannot be accepted as it is written
│   ├── NameTakenError      two jobs with one name, or an empty name
│   ├── DataError           no data, empty data, lengths that do not match
│   ├── ModelError          a model no adapter claims, or shared by two jobs
│   ├── OptimizerError      an optimizer that does not belong to the model
│   ├── LossError           a loss that is not a scalar, or none
│   └── BudgetError         a budget, or a memory limit, below what a job needs
├── FusionError         strategy="fused" for jobs that cannot be stacked
├── DeviceError         a device that does not exist
├── OptionError         an argument of train, plan, best or register with an unknown value
├── FileError           a jobs file that cannot be read, a script that is not there, a folder that holds no results
│   └── SaveError           results that could not be written; it carries them
├── TooLateError        a memory policy after a framework has begun without it
├── OutOfRoomError      a job that did not fit on the device, even alone (a value in its result, likewise)
├── WorkerError         a worker process that died, hung, or raised what cannot be handed over
└── StepError           a job that failed while running (a value in its result unless on_error="raise")
Interrupted (a KeyboardInterrupt) carries the results so far, and so does what `train` raises after it has begun: `error.results`.

Misuse raises before anything runs; one job's failure while running is a value in its result. That is whatever a job's own code raises,
`SystemExit` and cancelled tasks too (`failure`): only Ctrl-C, a KeyboardInterrupt, is about the whole run.
Every message says what was expected, what was received and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

Raised = TypeVar("Raised", bound=BaseException)


class CarpoolError(Exception):
    """Root of every error carpool raises on purpose."""


class JobError(CarpoolError, ValueError):
    """A job that cannot be accepted as it is written."""


class NameTakenError(JobError):
    """Two jobs with one name, or an empty name."""


class DataError(JobError):
    """No data, empty data, or arrays whose lengths do not match."""


class ModelError(JobError):
    """A model no adapter claims, or one that two jobs share."""


class OptimizerError(JobError):
    """An optimizer that does not belong to the job's model."""


class LossError(JobError):
    """A loss that is missing or is not a scalar."""


class BudgetError(JobError):
    """A budget, or a memory limit, below what a job needs."""


class FusionError(CarpoolError, ValueError):
    """`strategy="fused"` was asked for and these jobs cannot be stacked."""


class DeviceError(CarpoolError, ValueError):
    """A device that does not exist on this machine."""


class OptionError(CarpoolError, ValueError):
    """An argument with an unknown value."""


class FileError(CarpoolError):
    """A jobs file that cannot be imported or holds no jobs, or a script that is not there."""


class SaveError(FileError, OSError):
    """Results that could not be written, as on a full disk. `results` holds them."""

    def __init__(self, text: str, results: Any) -> None:
        super().__init__(text)
        self.results = results


class TooLateError(CarpoolError, RuntimeError):
    """A memory policy was set after a framework had begun without it."""


class StepError(CarpoolError, RuntimeError):
    """A job failed while running."""


class OutOfRoomError(CarpoolError, MemoryError):
    """A job did not fit on the device, even alone."""


class WorkerError(CarpoolError, RuntimeError):
    """A worker process died or made no progress, or raised what cannot be handed over."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run. `results` holds what every job had reached."""

    def __init__(self, results: Any) -> None:
        super().__init__("interrupted; what was reached so far is in .results")
        self.results = results


def failure(error: BaseException) -> BaseException:
    """What a job's own code raised, as that job's failure. An interruption is nobody's failure: it is raised again.

    >>> failure(SystemExit(3))
    SystemExit(3)
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    return error


def raisable(error: BaseException) -> Exception:
    """A job's failure in a form that can be raised for all of a run: a job that called `sys.exit` does not end the process.

    >>> raisable(SystemExit(3))
    StepError('SystemExit: exit code 3')
    """
    if isinstance(error, Exception):
        return error
    made = StepError(described(error))
    made.__cause__ = error
    return made


def noted(error: Raised, name: str) -> Raised:
    """The error, with whose it is, where it does not say so: it is shown below the traceback."""
    note = f"raised by job {name!r}"
    if not isinstance(error, CarpoolError) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def raise_with(error: BaseException, results: Any) -> NoReturn:
    """Raises the error with the results of the run as `.results`; where it takes no attribute, one of ours that it caused."""
    try:
        error.results = results  # pyright: ignore[reportAttributeAccessIssue]
    except Exception:
        ours = StepError(described(error))
        ours.results = results  # pyright: ignore[reportAttributeAccessIssue]
        raise ours from error
    raise error


def sentence(expected: str, received: str, remedy: str) -> str:
    """The one shape of our messages.

    >>> sentence("a batch size of at least 1", "0", "pass batch_size=32")
    'Expected a batch size of at least 1. Received: 0. Remedy: pass batch_size=32.'
    """
    end = "" if remedy.endswith("?") else "."
    return f"Expected {expected}. Received: {received}. Remedy: {remedy}{end}"


def printable(text: str) -> str:
    """Text that others wrote, as it is shown: in one line, and what a terminal would take for an order is spelt out.

    >>> printable("red " + chr(27) + "[31m"), printable("größer")
    ('red \\\\x1b[31m', 'größer')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def described(error: BaseException) -> str:
    """An exception in one line, the way reports show it.

    >>> described(SystemExit(3)), described(ValueError("no"))
    ('SystemExit: exit code 3', 'ValueError: no')
    """
    try:
        text = printable(" ".join(str(error).split()))
    except Exception:
        text = "its text cannot be had"
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        text = f"exit code {error.code or 0}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: Any, most: int = 80) -> str:
    """A value that was received, in one short line.

    >>> shown([1.5, None]), shown("x" * 9, most=8)
    ('[1.5, None]', "'xxxx...")
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def meant(word: Any, known: Iterable[str]) -> str:
    """The remedy where a word is nearly one that is known; nothing where it is not.

    >>> meant("val_acc", ["loss", "val_loss", "val_accuracy"]), meant("f1", ["loss"])
    ("did you mean 'val_accuracy'?", '')
    """
    if not isinstance(word, str):
        return ""
    names = {_bare(name): name for name in known}
    bare = _bare(word)
    near = difflib.get_close_matches(bare, names, n=1, cutoff=0.6)
    begins = [name for name in names if bare and (name.startswith(bare) or bare.startswith(name))]
    found = next(iter([*(begins if len(begins) == 1 else []), *near]), None)
    return f"did you mean {names[found]!r}?" if found is not None else ""


def _bare(name: str) -> str:
    return name.lower().replace("-", "_").strip("_")
