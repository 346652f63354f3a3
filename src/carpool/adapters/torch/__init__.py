"""PyTorch: the only place, with `kernels/`, that imports torch."""
