"""Doing it: the runtime that executes a `Layout` on `torch.distributed`. Modules import torch, this file does not."""

MOST_THREADS = 1024
"""Of a rank: a host of today has fewer cores, and not many times as many can be started."""
DEVICES = ("cpu", "cuda")
"""Where ranks compute."""
TRANSPORTS = ("auto", "shared", "gloo")
"""What carries collectives between CPU ranks: memory that they share, gloo, or what suits: the first where it can."""
