"""Whole training steps of small models as machine code: a member's weights stay in a core's cache for many steps.

`loops.py` says what a step computes, free of any framework; `lower/` makes it of a traced step; `merge.py` puts loops
together; `c.py` prints it. docs/kernels.md shows how they meet.
"""
