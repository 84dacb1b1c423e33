"""The sizes of a model and the devices of a cluster that a view's sliders change, and what they can be set to."""

import re
from collections.abc import Callable
from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, resolve
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


SEQS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens of a sequence that training views offer."""
SEQ = 8192


def offered(why_not: Callable[[ModelConfig], str]) -> tuple[list[str], dict[str, str]]:
    """(names of the catalog that a view can show, name -> reason of the others). why_not: the reason, "" for none."""
    reasons = {name: why_not(model) for name, model in catalog().items()}
    return [name for name, why in reasons.items() if not why], {name: why for name, why in reasons.items() if why}


def most_seq(model: ModelConfig) -> int:
    """Tokens of the longest sequence that a model can be trained on: learned positions have an end."""
    return model.max_positions if model.positions == "learned" else 1 << 24


def too_long(model: ModelConfig, seq: int) -> str:
    """Why a model cannot be trained on sequences of `seq` tokens; "" where it can."""
    most = most_seq(model)
    return f"{seq:,} tokens exceed its {most:,} positions" if seq > most else ""


def seqs(model: ModelConfig) -> list[int]:
    return [seq for seq in SEQS if seq <= most_seq(model)]
