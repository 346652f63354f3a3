"""From what the user asked for to the terms that scripts run under: device, caps, folder and environment."""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from carpool import environment
from carpool.arguments import MOST, Arguments
from carpool.errors import OptionError, sentence
from carpool.executors.scripts import Terms
from carpool.memory import device
from carpool.memory.device import DeviceMemory
from carpool.memory.enforce import visible_gpus
from carpool.memory.policy import Policy, allocator_bytes, variables
from carpool.memory.size import Limit, Size, limit, shown
from carpool.private import fault, foreign_link, make_folder
from carpool.process.mps import Service, thread_share


@dataclass(frozen=True)
class Wanted:
    """The options of `carpool exec`, checked before anything runs."""

    memory: Size = "auto"
    jobs: int | None = None
    share: float | None = None
    logs: Path | None = None


def found_device() -> tuple[DeviceMemory, bool]:
    """The memory that scripts share, and whether it is a GPU's."""
    gpus = device.gpus()
    is_gpu = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpus)) > 0
    return device.read("cuda" if is_gpu else "cpu"), is_gpu


def make_terms(wanted: Wanted, memory: DeviceMemory, is_gpu: bool, present: Mapping[str, str]) -> Terms:
    """Pure but for the clock: `present` is the environment the scripts would have without us."""
    if wanted.jobs is not None:
        Arguments().whole("--jobs", wanted.jobs, "pass --jobs 4, say", 1, MOST)
    policy = Policy(limit(wanted.memory, "--memory"))
    cap = policy.limit_bytes(memory.total_bytes) or 0
    if policy.limit.size_bytes is not None:
        cap = policy.limit.size_bytes
    if cap > memory.free_bytes:
        raise OptionError(
            sentence(
                f"--memory within the {shown(memory.free_bytes)} that are free on {memory.name}",
                f"{wanted.memory}, which is {shown(cap)}",
                "pass less, or free some",
            )
        )
    held = Policy(Limit(size_bytes=allocator_bytes(cap))) if is_gpu and cap else policy
    made = variables(held, memory.total_bytes if is_gpu else None, present)
    chosen = {**present, **made} if cap else {**made, **present}  # what was not asked for is only a default
    shares = {} if wanted.share is None else thread_share(wanted.share)
    return Terms(
        logs=wanted.logs or Path("carpool-logs", time.strftime("%Y%m%d-%H%M%S")),
        jobs=wanted.jobs or environment.cores(),
        cap_bytes=cap,
        capacity_bytes=memory.free_bytes,
        is_host_memory=not is_gpu,
        environment={**chosen, **shares, "PYTHONUNBUFFERED": "1"},
    )


def with_service(terms: Terms, service: Service) -> Terms:
    """The terms of clients of this service."""
    return replace(terms, environment={**terms.environment, **service.variables})


def with_folder(terms: Terms, wanted: Wanted) -> Terms:
    """The terms with their folder made; one that we named ourselves is always new, and this user's alone."""
    asked = wanted.logs or terms.logs
    try:
        if theirs := foreign_link(asked.absolute()):
            raise _refused(theirs)
        if wanted.logs is not None:
            make_folder(asked)
            return terms
        make_folder(asked.parent)
        if wrong := fault(asked.parent, stat.S_IWOTH):
            raise _refused(f"{asked.parent}: {wrong}")
        return replace(terms, logs=_new_folder(asked))
    except OSError as error:
        raise _refused(f"{asked}: {error.strerror}") from None


def _refused(received: str) -> OptionError:
    return OptionError(sentence("a folder for --logs", received, "name another one"))


def _new_folder(wanted: Path) -> Path:
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("counting does not end")
