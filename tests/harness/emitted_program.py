"""A rank of an emitted program of plain PyTorch: its losses, and the bytes that it sends."""

import contextlib
import io
import os
import re
import runpy
import sys
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEDGER_OPS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather_into",
    "_reduce_scatter_base_": "reduce_scatter",
}
"""torch's operation -> the ledger's."""


class SentBytes(TorchDispatchMode):
    """Bytes of the full tensors of collectives, by the ledger's operation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Its own collectives pass by here.
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            op = LEDGER_OPS.get(name.partition(".")[0], name)
            self.sent[op] += max((one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor)), default=0)
        return func(*args, **(kwargs or {}))


def run(rank: int, payload: tuple[str, list[str], int]) -> tuple[list[float], dict[str, int]]:
    """(losses of rank 0, bytes by operation). payload: (program, arguments, a free port)."""
    program, arguments, port = payload
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size(), "MASTER_PORT": port}
    dist.barrier()  # until all have connected
    dist.destroy_process_group()
    before = sys.argv, dict(os.environ)
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {key: str(value) for key, value in place.items()}
        sys.argv = [program, *arguments]
        with contextlib.redirect_stdout(io.StringIO()) as printed, SentBytes() as bytes_:
            runpy.run_path(program, run_name="__main__")
    finally:
        sys.argv = before[0]
        os.environ.clear()
        os.environ |= before[1]
    return [float(text) for text in re.findall(r"loss (\S+)", printed.getvalue())], dict(bytes_.sent)
