"""Doing it: the runtime that executes a `Layout` on `torch.distributed`. Its modules import torch; this file does not."""
