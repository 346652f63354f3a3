"""Numbers that the torch and the JAX models share; importing this imports no framework."""

CLASSES = 10
TOKENS = 128
LENGTH = 64
RESNET_WIDTHS = (64, 128, 256, 512)
RESNET_BLOCKS = 2
SMALL_RESNET_WIDTHS = (4, 8)
SMALL_RESNET_BLOCKS = 1
