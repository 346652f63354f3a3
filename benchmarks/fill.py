"""A script that takes as much of a GPU as it is let, works there for a while, and says how much it held: torch or JAX."""

import sys
import time

_SIDE, _SECONDS = 4096, 4.0


def _torch():
    import torch

    return (
        lambda: torch.ones(_SIDE, _SIDE, device="cuda"),
        torch.matmul,
        lambda made: made.sum().item(),
        torch.OutOfMemoryError,
    )


def _jax():
    import jax
    import jax.numpy as jnp

    return (
        lambda: jnp.ones((_SIDE, _SIDE)).block_until_ready(),
        jnp.matmul,
        lambda made: made.sum().item(),
        jax.errors.JaxRuntimeError,
    )


def main(framework: str) -> None:
    make, times, wait, full = {"torch": _torch, "jax": _jax}[framework]()
    held = []
    try:
        while True:
            held.append(make())
    except full:
        count = len(held)
        del held[-8:]
    end, steps = time.monotonic() + _SECONDS, 0
    while time.monotonic() < end:
        wait(times(held[0], held[1]))
        steps += 1
    print(f"{framework} held {count * _SIDE * _SIDE * 4 >> 20} MiB and did {steps} products")


main(sys.argv[1])
