"""`Reading`: what a configuration of another engine says, in our terms."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from shardwise.layout import Layout
from shardwise.model import ModelConfig

FileReader = Callable[[str], Mapping[str, Any]]
"""The table in a file that a configuration names. Raises `UserError` where it cannot be read."""

PREFILL_TOKENS = 8192
"""Tokens of one forward pass at most, as they are written: engines' defaults differ by version and GPU."""


@dataclass(frozen=True)
class ServerSettings:
    """The numbers of a server. weights, cache: torch's names of the types that are stored, the cache's empty where it
    is as the model's files have it; length: tokens of the longest sequence; sequences, tokens: the most of one
    iteration; memory: share of a device's memory that it may use. None: the configuration does not say, and memory is
    the engine's default on the device."""

    weights: str = "bfloat16"
    cache: str = ""
    length: int | None = None
    sequences: int | None = None
    tokens: int | None = None
    memory: float | None = None
    cpu_bytes: float = 0.0
    """Bytes of a GPU's weights that stay in the host's memory."""
    cache_bytes: int | None = None
    """Bytes of a GPU's cache, in place of a share of its memory."""
    cache_tokens: int | None = None
    """The most tokens of the cache."""
    cache_cut: int = 1
    """Tensor-parallel ranks over which the tokens of a sequence's cache are cut."""


SERVED = tuple(one.name for one in fields(ServerSettings))
"""Names of a server's numbers."""


@dataclass(frozen=True)
class Reading:
    """One configuration.

    seq, batch: tokens of a sequence, sequences of a step over all ranks; None where it does not say. model: what it
    calls the model; described: the model itself, where its arguments say enough. served: of an engine that serves.
    facts: what it says that a layout has no word for, a sentence each; notes: what people trip over. ignored: keys that
    change neither how it is split nor what it holds; unknown: keys that are not known here, with the nearest that are.
    """

    engine: str
    layout: Layout
    seq: int | None = None
    batch: int | None = None
    optimizer: str | None = None
    """One of `layout.optimizers.OPTIMIZERS`, where it is not AdamW."""
    model: str | None = None
    described: ModelConfig | None = None
    served: ServerSettings | None = None
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    """Doubts about the layout, with what would settle them."""
    unpriced: str = ""
    """Why memory and time of a step cannot be counted; empty where they can."""
    narrow_state: bool = False
    """Weights, gradients and moments are kept in 16 bits, without master weights."""
    recomputed: tuple[str, ...] = ()
    """Modules that backward computes again, by Megatron-LM's names."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, without what is not said."""
        data = asdict(self) | {"layout": str(self.layout), "ranks": self.layout.ranks}
        return {name: value for name, value in data.items() if value is not None}
