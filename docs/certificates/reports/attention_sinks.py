"""Megatron-LM issue 7452, finding 8: learnable attention sinks are left out of the gradient norm."""

import torch
from torch import nn

from shardwise.certify.engines.megatron import *  # noqa: F403
from shardwise.certify.engines.megatron import CONFIG, PARTS
from shardwise.certify.tiny import Tiny, TinyBlock

variants = ("plain",)
CONFIG["softmax_type"] = "learnable"
PARTS["self_attention.core_attention"] = ("sinks",)


class Sinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.randn(4))  # one per head


class SinkBlock(TinyBlock):
    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        sinks = self.sinks.softmax_offset[:, None, None].expand(*scores.shape[:-1], 1)
        y = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def with_sinks(variant):
    model = Tiny(variant)
    for block in model.blocks:
        block.__class__, block.sinks = SinkBlock, Sinks()
    return model


models = {"tiny with sinks": with_sinks}
