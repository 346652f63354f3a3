"""Our messages, with the job that they are about."""

from __future__ import annotations

from carpool.errors import sentence
from carpool.job import Job


def says(job: Job, expected: str, received: str, remedy: str) -> str:
    return f"Job {job.name!r}: " + sentence(expected, received, remedy)
