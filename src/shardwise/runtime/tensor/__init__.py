"""Tensor and sequence parallelism: linear maps, attention and loss of one rank."""
