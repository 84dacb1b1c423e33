"""Visibility of tokens to each other in attention over a cut sequence."""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch, random
from shardwise.decoder.attention import CoreAttention
from shardwise.layout.context import SequenceCut
from shardwise.ops.blockwise import Scores
from shardwise.runtime.tensor.loss import IGNORED


@dataclass
class ContextBatch(Batch):
    """A batch whose sequences are cut over context-parallel ranks: its fields are of this rank's tokens."""

    whole: Batch | None = None
    """The batch of whole sequences, which every rank can make without communication; None where attention needs no more
    than the order of tokens."""

    def fresh(self) -> "ContextBatch":
        """A copy without the values that blocks share."""
        return replace(self, _shared={}, whole=self.whole and self.whole.fresh())


def cut_sequences(batch: Batch, targets: Tensor, cut: SequenceCut, rank: int) -> tuple[ContextBatch, Tensor]:
    """The tokens that `rank` has of whole sequences [B, S], and their targets. Padding has no target."""
    places = local_places(cut, rank, batch.ids.device)

    def mine(x: Tensor, fill: int = 0) -> Tensor:
        return F.pad(x, (0, cut.padded - cut.seq), value=fill)[:, places]

    positions, index = mine(batch.positions), mine(batch.index)
    needed = batch.documents is not None or not cut.zigzag
    local = ContextBatch(
        mine(batch.ids), positions, index, None, positions, index, batch.dropout_key, whole=batch if needed else None
    )
    return local, mine(targets, IGNORED)


def local_places(cut: SequenceCut, rank: int, device: torch.device) -> Tensor:
    """Place in the padded sequence of each token of a rank: int64 [S / cp]."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in cut.places(rank)])


def block_scores(batch: ContextBatch, core: CoreAttention, cut: SequenceCut, rank: int, other: int) -> Scores:
    """The pairs of the queries of `rank` and the keys of rank `other` that see each other, and what dropout keeps."""
    rows, columns, causal = cut.visible(rank, other)
    keep = None
    if core.dropout.drop and batch.dropout_key is not None:
        keep = partial(_kept, batch, core, cut, rows, local_places(cut, other, batch.index.device)[columns])
    window = core.window if core.window < cut.seq else 0
    if not window and (batch.whole is None or batch.whole.documents is None):
        return Scores(causal, keep=keep)
    name = f"pairs with rank {other} within {window}"
    return Scores(causal, batch.shared(name, partial(_allowed, batch, cut, rank, other, window)), keep)


def _allowed(batch: ContextBatch, cut: SequenceCut, rank: int, other: int, window: int) -> Tensor:
    """[B, S, T]: which pairs of a block see each other: of one document, and less than `window` tokens apart."""
    rows, columns, _ = cut.visible(rank, other)
    mine, theirs = (local_places(cut, r, batch.index.device) for r in (rank, other))
    mine, theirs = mine[rows], theirs[columns]
    apart = mine[:, None] - theirs
    pairs = ((apart >= 0) & (apart < window) if window else apart >= 0).expand(len(batch.index), -1, -1)
    if batch.whole is not None and batch.whole.documents is not None:
        documents = F.pad(batch.whole.documents, (0, cut.padded - cut.seq), value=-1)
        pairs = pairs & (documents[:, mine, None] == documents[:, None, theirs])
    return pairs


def _kept(
    batch: ContextBatch, core: CoreAttention, cut: SequenceCut, rows: slice, columns: Tensor, heads: int
) -> Tensor:
    """[B, H, S, T]: one device's masks of the probabilities, which depend on the places of query and key."""
    index = batch.index[:, rows]
    here = torch.arange(core.first_head, core.first_head + heads, device=index.device)
    firsts = (index[:, None, :] * core.heads + here[None, :, None]) * cut.seq
    drop = core.dropout.drop
    kept = random.keep_mask(random.key(batch.dropout_key or 0, core.dropout.site), firsts[..., None] + columns, drop)
    return kept / (1 - drop)
