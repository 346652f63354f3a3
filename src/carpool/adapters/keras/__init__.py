"""Keras 3 on JAX, torch and TensorFlow."""
