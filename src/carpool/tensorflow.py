"""For TensorFlow: the seeds that a job's steps are given, and how memory is taken. Importing this imports TensorFlow."""

from carpool.adapters.tensorflow.memory import Cap, caps
from carpool.adapters.tensorflow.seeds import step_seed

__all__ = ["Cap", "caps", "step_seed"]
