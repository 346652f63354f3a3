"""Model-batched operators: what a fused step needs that a framework does not have. One file for each kind."""
