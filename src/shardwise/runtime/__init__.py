"""Doing it: the runtime that executes a `Layout` on `torch.distributed`. Modules import torch, this file does not."""

TRANSPORTS = ("auto", "shared", "gloo")
"""What carries collectives between CPU ranks: memory that they share, gloo, or what suits: the first where it can."""
