"""TensorFlow 1 graphs as jobs: each under a session of its own, stepped by a thread of its own."""
