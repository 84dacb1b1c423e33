"""Memory of blocks with latent attention, and of embeddings with a norm.

To memory, a block with latent attention is one with heads as wide (`alike`), and what low ranks save beside that
(`more`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.model import ModelConfig

if TYPE_CHECKING:
    from shardwise.predict.memory.activations import Sizes


@lru_cache(maxsize=64)
def alike(model: ModelConfig) -> ModelConfig:
    """The model itself, or a dense one with plain attention whose blocks save as much in their widths."""
    changes: dict[str, Any] = {}
    if latent := model.latent_attention:
        # Queries and keys are wider than values and what comes out: in all, four of the mean width.
        both = latent.nope_head_dim + latent.rope_head_dim + latent.v_head_dim
        changes |= {"latent_attention": None, "kv_heads": model.heads, "head_dim": 2 * -(-both // 4)}
    return model.replace(**changes) if changes else model


class More(NamedTuple):
    """Bytes of one micro-batch beyond those of a block `alike` and of a plain embedding."""

    embedding: int
    """Saved by the embedding."""
    block: int
    """Saved by a block."""
    kept: int
    """Kept by a block from the gradient of its input to that of its weights."""
    in_block: int
    """Transients of a block's backward."""


NOTHING = More(0, 0, 0, 0)


def more(model: ModelConfig, s: Sizes, recompute: str) -> More:
    """Saved tensors of routing, low ranks and a norm after the embedding."""
    if not (model.latent_attention or model.embedding_norm):
        return NOTHING
    saved = 0
    if latent := model.latent_attention:
        # Each low rank before and after its norm, and the keys' rotated part.
        saved += s.stream * (2 * latent.q_rank + 2 * latent.kv_rank + latent.rope_head_dim) * s.element
    again = recompute == "full"
    norm = (s.stream * s.hidden + 2 * s.stream) * s.element if model.embedding_norm else 0
    return More(norm, 0 if again else saved, 0, saved if again else 0)
