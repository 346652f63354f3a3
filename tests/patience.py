"""How long a test waits for what must come: for ever, nearly. It bounds what hangs, and decides nothing.

A machine with busy neighbours may be ten times as slow as a quiet one, and a test must not tell the two apart. It is less than what pytest gives a
test (`timeout` in pyproject.toml), so that what a test waited for is what fails.
"""

PATIENCE_S = 900
