"""Where a run computes, for those who are made before it is known: whoever holds this need not hold the adapter, so no cycle keeps its models."""

from __future__ import annotations


class Place:
    """A device's name, once the run has said which.

    >>> place = Place()
    >>> place.name = "cuda:0"
    >>> place()
    'cuda:0'
    """

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def __call__(self) -> str:
        return self.name
