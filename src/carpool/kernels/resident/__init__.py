"""Whole training steps of small models as machine code: a member's weights stay in a core's cache.

`loops.py` says what a step computes, free of any framework; `builder.py` makes loops of values, `lower/` of
a traced step's operators. `merge.py` puts loops together, `twins.py` turns matrices as products read them.
`c.py` prints loops, `arithmetic.py` holds the functions of elements, and `launching.py` what runs a step
many times; `step.py` is all of it.
docs/kernels.md shows how they meet.
"""
