"""What Keras draws from where a layer is given no seed: one generator for each thread."""

from __future__ import annotations

from keras.random import SeedGenerator
from keras.src.backend.common.global_state import set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR


def draws_from(seed: int) -> None:
    """This thread has a new generator, of this seed.

    It is made at once: one that Keras makes in the middle of a layer's symbolic call holds no number. It has a name, so that none of
    the names that Keras counts up are another.
    """
    set_global_attribute(GLOBAL_SEED_GENERATOR, SeedGenerator(seed % 2**31, name="carpool_seeds"))
