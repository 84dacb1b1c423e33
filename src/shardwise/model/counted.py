"""`Counted`: a model that is counted and planned from the shapes of its tensors, and has no decoder here."""

import json
from dataclasses import asdict, field, replace
from typing import Any, Literal

from shardwise.model.blueprint import Part
from shardwise.records import dataclass

CacheType = Literal["full", "window", "latent", "indexed", "compressed", "linear", "none"]


@dataclass(frozen=True)
class LayerCache:
    """Cache of one layer for one sequence."""

    kind: CacheType
    numbers: int = 0
    """Numbers per token, or per entry where `every` tokens share one."""
    heads: int = 0
    """Key/value heads that tensor parallelism divides; 0: every rank holds all of it."""
    window: int = 0
    """The most tokens that are kept; 0 means all."""
    every: int = 1
    """Tokens per entry."""
    extra: int = 0
    """Bytes per token beside that, held by every rank whatever the cache's type: keys of an indexer."""
    state: int = 0
    """Numbers per sequence, whatever its length: states of linear attention."""

    def numbers_of(self, tokens: float, tp: int, width: float = 2) -> float:
        """Numbers, of `width` bytes, of a sequence of so many tokens on one of `tp` ranks."""
        kept = min(tokens, self.window) if self.window else tokens
        share = max(1, self.heads // tp) / self.heads if self.heads else 1.0
        return kept / self.every * self.numbers * share + tokens * self.extra / width + self.state / tp


@dataclass(frozen=True)
class Counted:
    """What `ModelConfig` cannot say of a model: its parts and the cache of each layer."""

    family: str
    """Its model_type."""
    reason: str
    """Why no decoder here computes it."""
    parts: tuple[Part, ...] = field(compare=False)
    caches: tuple[LayerCache, ...]
    stored: str = ""
    """The precision of its files, in words; empty for 16 bits."""
    cache_type: str = ""
    """torch's name of the type of keys and values that its files name; empty for 16 bits."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    predicting: int = 0
    """Parameters for multi-token prediction in its files: beside those of `parts`, and not loaded."""
    source: dict[str, Any] = field(default_factory=dict, compare=False)
    """Contents of its config.json, by which a class of transformers is built."""
    digest: str = ""
    """Of the parts: what models are told apart by."""

    def __post_init__(self) -> None:
        if not self.digest:
            import hashlib

            text = json.dumps([asdict(part) for part in self.parts])
            object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What predictions of a step take for granted, in sentences."""
        stored = (
            (f"its files are in {self.stored}: dequantize them first, training counts 16 bits",) if self.stored else ()
        )
        near = "parameters are exact; activations, traffic and times are the nearest decoder's: `trace` has the class's"
        return (*self.notes, near, *stored)

    def cache_bytes(
        self, tokens: float, tp: int = 1, first: int = 0, stop: int | None = None, width: float = 2
    ) -> float:
        """Bytes of the cache of a sequence of so many tokens, of some layers, on one of `tp` ranks. width: bytes of a
        number."""
        return width * sum(cache.numbers_of(tokens, tp, width) for cache in self.caches[first:stop])

    def cut(self, layers: int, mixed: bool, routed: bool) -> "Counted":
        """The model with its first layers alone; one layer is the first with experts (`mixed`), else without. routed:
        whether there are experts at all."""
        ends = [part for part in self.parts if part.kind != "block"]
        blocks = [part for part in self.parts if part.kind == "block"]
        if layers == 1:
            blocks = sorted(blocks, key=lambda part: part.routes != mixed)[:1]
        if not routed:
            blocks = [part.without_experts for part in blocks]
        kept: list[Part] = []
        for part in blocks:
            first = sum(p.count for p in kept)
            if first < layers:
                kept.append(replace(part, first=first, count=min(part.count, layers - first)))
        return replace(self, parts=(ends[0], *kept, *ends[1:]), caches=self.caches[:layers], digest="")
