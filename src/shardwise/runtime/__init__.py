"""Doing it: the runtime that executes a `Layout` on `torch.distributed`. Modules import torch, this file does not."""

MOST_THREADS = 1024
"""Most threads of a rank: a host of today has fewer cores, and not many times as many can be started."""
DEVICES = ("cpu", "cuda")
"""Devices on which ranks compute."""
TRANSPORTS = ("auto", "shared", "gloo")
"""Transports of collectives between CPU ranks: memory that they share, gloo, or what suits: the first where it can."""
