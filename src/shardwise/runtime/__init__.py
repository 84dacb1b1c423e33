"""Doing it: the runtime that executes a `Layout` on `torch.distributed`. Modules import torch, this file does not."""
