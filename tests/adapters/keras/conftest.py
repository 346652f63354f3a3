"""One backend in a process: the one that KERAS_BACKEND names, JAX unless it says otherwise (tests/test_keras_backends.py runs the others)."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
