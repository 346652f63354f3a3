"""Numbers that the torch and the JAX models share; importing this imports no framework."""

CLASSES = 10
TOKENS = 128
LENGTH = 64
