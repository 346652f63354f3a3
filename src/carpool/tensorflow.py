"""For TensorFlow: graphs of TensorFlow 1 as jobs, and sessions side by side. Importing this imports TensorFlow."""

from carpool.adapters.graph.model import Graph
from carpool.adapters.graph.sessions import Sessions, run, sessions

__all__ = ["Graph", "Sessions", "run", "sessions"]
