"""A model's blueprint, and the counts that follow from it.

The list of parameters is the ground truth. The decoder's modules must produce exactly these names and shapes (a test
holds them to it), the layout places these tensors on ranks, the checkpoint stores them under these names.
"""

from functools import lru_cache
from itertools import pairwise

from shardwise.model import mechanisms
from shardwise.model.adapters import is_scale, with_adapters
from shardwise.model.blueprint import Blueprint, ForeignSlice, Parameter, Part, PartKind
from shardwise.model.config import ModelConfig
from shardwise.model.families import family_of

Model = ModelConfig | Blueprint
"""A model by its configuration, or, where it has none, by its parts: a user's module."""


def blueprint(model: Model) -> Blueprint:
    """Parts of a model, under the names of its nearest family."""
    return model if isinstance(model, Blueprint) else _blueprint(model)


@lru_cache(maxsize=64)
def _blueprint(config: ModelConfig) -> Blueprint:
    if config.counted:
        whole = Blueprint(config.name, config.hidden, config.counted.parts)
        return with_adapters(whole, config.lora) if config.lora else whole
    names, module = family_of(config).names, family_of(config).module

    def part(
        name: str, kind: PartKind, pieces: mechanisms.Pieces, gathered: int, summed: int, first: int | None = None,
        count: int = 1, reads: tuple[str, ...] = (),
    ) -> Part:  # fmt: skip
        found = list(pieces)
        weights = (piece for piece in found if isinstance(piece, Parameter))
        named = tuple(names.give(config, name, p) if names else p for p in weights)
        operations = tuple(piece for piece in found if not isinstance(piece, Parameter))
        return Part(name, kind, module, named, operations, gathered, summed, first, count, reads)

    dense = min(config.experts.dense_layers, config.layers) if config.experts else config.layers
    # Routed tokens are those of a rank's own shard of the stream; attention and shared experts see the whole one.
    mixed = 2 if config.experts and config.experts.shared else 1
    blocks = []
    every = config.full_attention_every if config.window else 0
    changes = (i for i in range(config.layers if every else 0) if i % every == 0 or (i + 1) % every == 0)
    for first, stop in pairwise(sorted({0, dense, config.layers, *changes})):
        pieces = mechanisms.block(config, first >= dense, config.layer_window(first))
        crossings = mixed if first >= dense else 2
        blocks.append(part("blocks", "block", pieces, crossings, crossings, first, stop - first))
    embedding = part("embedding", "embedding", mechanisms.embedding(config), 0, 1)
    table = (f"embedding.{embedding.parameters[0].name}",) if config.tied else ()
    head = part("head", "head", mechanisms.head(config), 1, 0, reads=table)
    whole = Blueprint(config.name, config.hidden, (embedding, *blocks, head))
    return with_adapters(whole, config.lora) if config.lora else whole


def parameters(model: Model) -> list[Parameter]:
    """All parameters, part by part. A tied model has no `head.out.weight`: the head uses `embedding.tokens.weight`."""
    return list(blueprint(model).parameters())


def foreign_slices(config: ModelConfig) -> dict[str, ForeignSlice]:
    """Parameter -> where Hugging Face stores it, as far as that is known."""
    return {p.name: p.foreign for p in blueprint(config).parameters() if p.foreign}


def count(config: Model) -> int:
    """Number of parameters, tied ones once."""
    return count_parts(config)[0]


def count_trained(config: Model) -> int:
    """Number of parameters that are trained."""
    return sum(part.count * p.numel for part in blueprint(config).parts for p in part.parameters if not p.frozen)


def count_parts(config: Model) -> tuple[int, int, int]:
    """(all, blocks, active for one token): `blocks` leaves out embedding, final norm and head."""
    parts = blueprint(config).parts
    sizes = [part.count * sum(p.numel for p in part.parameters if not is_scale(p.name)) for part in parts]
    everything = sum(sizes)
    blocks = sum(size for part, size in zip(parts, sizes, strict=True) if part.kind == "block")
    routed = sum(part.count * p.numel for part in parts for p in part.parameters if p.cut == "expert")
    e = config.experts
    return everything, blocks, everything - (routed // e.count * (e.count - e.active) if e else 0)
