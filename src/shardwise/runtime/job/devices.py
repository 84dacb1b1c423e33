"""The device of a rank, which ranks of one host may have to share."""

from __future__ import annotations

import os
import warnings

import torch

from shardwise.errors import UserError

WARNINGS = (".*there was no current CUDA context", "TensorFloat32 tensor cores")
"""What torch warns of, and users cannot change: autograd's thread makes its context with its first product, and fp32 is
computed in fp32 because `--matmul` says so."""


def cuda_device(local: int) -> torch.device:
    """Device of the `local`-th rank of this host: ranks take the host's devices in turn. It is made the current one.

    Raises `UserError` where there is none.
    """
    count = torch.cuda.device_count()
    if not count:
        raise UserError("--device cuda needs a GPU, and there is none")
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return device


def sharing(device: torch.device) -> str:
    """What to say where this host has more ranks than CUDA devices (LOCAL_WORLD_SIZE); empty where no rank shares one.

    Without LOCAL_WORLD_SIZE all ranks are of this host.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    if device.type != "cuda" or ranks <= torch.cuda.device_count():
        return ""
    count = torch.cuda.device_count()
    devices = f"{count} GPU{'s' if count > 1 else ''}"
    return f"{ranks} ranks share {devices}: collectives go through host memory, which is slow and meant for tests"
