"""For TensorFlow: seeds of steps, caps of memory, graphs of TensorFlow 1 as jobs, sessions side by side. Importing this imports TensorFlow."""

from carpool.adapters.graph.model import Graph
from carpool.adapters.graph.sessions import Sessions, run, sessions
from carpool.adapters.tensorflow.memory import Cap, caps
from carpool.adapters.tensorflow.seeds import step_seed

__all__ = ["Cap", "Graph", "Sessions", "caps", "run", "sessions", "step_seed"]
