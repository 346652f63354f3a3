"""For TensorFlow: the seeds that a job's steps are given. Importing this imports TensorFlow."""

from carpool.adapters.tensorflow.seeds import step_seed

__all__ = ["step_seed"]
