"""What ranks run for the tests of quantized gathers: a step whose weights are rounded before a plain gather."""

from __future__ import annotations

from unittest.mock import patch

import torch

from harness.jobs import RankOutcome, Training, train
from shardwise.layout.units import WEIGHT_BITS, Gather
from shardwise.layout.wire import packed_bytes
from shardwise.runtime.transport.protocol import Work
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.quantized import pack, unpack


def rounded(rank: int, asked: Training) -> RankOutcome:
    """Train with every gathered weight rounded as qwz rounds it, and gathered in compute precision."""

    def start(engine: Engine, gather: Gather) -> Work:
        flat = engine.units[gather.unit]
        piece = torch.empty(flat.unit.shard_numel, dtype=flat.whole.dtype)
        if flat.unit.shard_ranks > 1:
            packed = torch.zeros(packed_bytes(len(piece), WEIGHT_BITS), dtype=torch.uint8)
            pack(flat.interval, WEIGHT_BITS, packed)
            unpack(packed, WEIGHT_BITS, piece)
        else:
            piece.copy_(flat.interval)
        return engine.comms.all_gather(flat.whole, piece, gather.axes, gather.unit, later=True)

    with patch.object(Engine, "_start", start):
        return train(rank, asked)
