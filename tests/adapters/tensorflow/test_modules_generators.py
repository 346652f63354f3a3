"""What a module's job draws from TensorFlow's own generator depends on its seed alone, whatever runs beside it."""

import tensorflow as tf

from carpool.ambient import Ambient, seeded


def test_tensorflows_eager_numbers_are_a_programs_own_also_under_the_seed_that_the_process_has():
    def drawn(count: int) -> list[float]:
        return [float(tf.random.normal(())) for _ in range(count)]

    tf.random.set_seed(3)
    wanted = drawn(4)
    tf.random.set_seed(3)
    assert drawn(1) == wanted[:1]
    other = Ambient(3)
    for first in range(3):
        with other.inside():
            assert drawn(1) == wanted[first : first + 1]
        with seeded(3):
            assert drawn(2) == wanted[:2]
    assert drawn(3) == wanted[1:]
