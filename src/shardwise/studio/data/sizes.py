"""The sizes of a model and the devices of a cluster that a view's sliders change, and what they can be set to."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.changes import change
from shardwise.studio.query import Query

SIZES = {
    "layers": (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 126),
    "hidden": (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384),
    "ffn": (512, 1024, 2048, 3072, 4096, 8192, 11008, 14336, 16384, 28672, 53248),
    "heads": (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128),
}
"""Field of a model -> values that a slider offers, as far as the model is legal with them."""
MOST = 1 << 20
DEVICES = (2, 4, 8, 16, 32, 64)
_NODE = 8


def sized(query: Query, default: str) -> tuple[ModelConfig, list[str]]:
    """The model of a state with its sizes, and the words of a command line that change it. Raises `UserError`."""
    model = resolve(query.text("model", default), fetch=False)
    target = {name: query.whole(name, getattr(model, name), 1, MOST) for name in SIZES}
    changes = ",".join(f"{name}={value}" for name, value in target.items() if value != getattr(model, name))
    return change(model, changes), ["--set", changes] * bool(changes)


@lru_cache(maxsize=64)
def sizes(model: ModelConfig) -> dict[str, list[int]]:
    """Size -> its legal values while the others stay as they are."""

    def legal(name: str, value: int) -> bool:
        try:
            change(model, f"{name}={value}")
        except UserError:
            return False
        return True

    return {
        name: sorted({getattr(model, name), *(value for value in values if legal(name, value))})
        for name, values in SIZES.items()
    }


def other_clusters(text: str, works: Callable[[Cluster], bool]) -> list[str]:
    """Clusters of more and fewer devices of the same kind that work, by size; of a file that one alone."""
    match = re.fullmatch(r"(?:\d+x)?\d+x(.+)", text.strip(), re.IGNORECASE)
    if not match or text.lower().endswith(".toml"):
        return [text]
    offered = (f"{n}x{match[1]}" if n <= _NODE else f"{n // _NODE}x{_NODE}x{match[1]}" for n in DEVICES)
    clusters = {other: Cluster.parse(other) for other in (text, *offered)}
    return sorted(
        (other for other, cluster in clusters.items() if other == text or works(cluster)),
        key=lambda other: (clusters[other].devices, clusters[other].nodes),
    )
