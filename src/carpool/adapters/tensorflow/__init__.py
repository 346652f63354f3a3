"""TensorFlow 2 without Keras: modules and their own steps."""
