"""torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

name = "torch DDP"
axes = data = ("dp",)
space = {"dp": (1, 2, 3, 4), "bucket": ("all", "small"), "views": (0, 1)}
broadcasts = True
variants = ("plain", "uneven", "tied", "frozen", "padded", "dropout")


def parallelize(model: nn.Module, layout: dict[str, Any]) -> Any:
    """Buckets of 25 MB, or small ones."""
    size = 0.002 if layout.get("bucket") == "small" else 25  # megabytes
    views = bool(layout.get("views", 0))
    return DistributedDataParallel(model, bucket_cap_mb=size, gradient_as_bucket_view=views)
