"""Rows of a stack and where they stand, in columns: thousands that move together are looked at as one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from carpool.adapters.torch.transfer import sent
from carpool.planning.cursor import Cursor


class Rows:
    """Some rows of a stack of so many, as the host and as the device index them."""

    def __init__(self, rows: tuple[int, ...], width: int, device: torch.device) -> None:
        self.rows = rows
        self.host = np.array(rows, np.int64)
        self.device = sent(self.host, device)
        is_whole = np.array_equal(self.host, np.arange(width))
        self.place: slice | np.ndarray = slice(None) if is_whole else self.host
        """Where they are in an array of the host's with a place for every row."""


@dataclass(frozen=True)
class Standing:
    """Epoch, batch and step of each row, or of all rows as one: [rows] or [1]."""

    epochs: np.ndarray
    batches: np.ndarray
    steps: np.ndarray


def standing(cursors: tuple[Cursor, ...]) -> Standing:
    """Where rows with these cursors stand.

    >>> standing((Cursor(2, 0, 8), Cursor(2, 0, 8))).steps.tolist()
    [8]
    >>> standing((Cursor(2, 0, 8), Cursor(1, 3, 7))).batches.tolist()
    [0, 3]
    """
    are_together = cursors.count(cursors[0]) == len(cursors)
    return Standing(*np.array(cursors[:1] if are_together else cursors, np.int64).T)
