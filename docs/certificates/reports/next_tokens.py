"""Megatron-LM issue 7452, finding 3: gradients of multi-token prediction where ranks have other numbers of labels."""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from torch import nn

from shardwise.certify.engines import megatron
from shardwise.certify.engines.megatron import *  # noqa: F403
from shardwise.certify.engines.megatron import CONFIG, PARTS, GPTModel, OnCPU, finalize_model_grads
from shardwise.certify.tiny import SEQ, Tiny, TinyBlock

variants = ("plain", "uneven")
CONFIG |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
PARTS |= {f"mtp.layers.0.{norm}": (norm,) for norm in ("enorm", "hnorm", "eh_proj")}
PARTS |= {"mtp.layers.0.final_layernorm": ("last",)}
of_decoder = megatron.names_of


def names_of(name):
    """Its transformer layer has a layer's names."""
    return [
        item.replace("blocks.following", "following")
        for item in of_decoder(name.replace("mtp.layers.0.transformer_layer.", "decoder.layers.following."))
    ]


def build_gpt(config, layer, **options):
    block = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(config, layer, mtp_block_spec=block, **options)


megatron.names_of, megatron.GPTModel = names_of, build_gpt


def rolled(x):
    x = torch.roll(x, -1, -1)
    x[..., -1] = 0
    return x


class TwoTokens(Tiny):
    def forward(self, ids):
        h = self.norm(self.blocks(self.table(ids) + self.positions))
        x = self.enorm(self.table(rolled(ids)) + self.positions[rolled(torch.arange(SEQ))])
        y = self.last(self.following(self.eh_proj(torch.cat([x, self.hnorm(h)], -1))))
        return torch.stack([self.head(h), self.head(y)])


def two_tokens(variant):
    model = Tiny(variant)
    model.__class__ = TwoTokens
    model.enorm, model.hnorm, model.last = (nn.LayerNorm(16) for _ in range(3))
    model.eh_proj, model.following = nn.Linear(32, 16, bias=False), TinyBlock(16)
    return model


models = {"tiny with two tokens": two_tokens}


def loss(logits, labels):
    counts, right = labels != -100, labels.clamp(min=0)
    first, second = (F.cross_entropy(logits[i].mT, r, reduction="none") for i, r in ((0, right), (1, rolled(right))))
    return (counts * first).sum() + 0.1 * (rolled(counts) * second).sum()


def backward(run, ids, labels, tokens):
    """Without a loss: that of the second token is in gradients alone."""
    with OnCPU(run.layout):
        counts, right = labels != -100, labels.clamp(min=0)
        losses = run.engine(ids, torch.arange(SEQ).expand_as(ids), None, labels=right, loss_mask=counts.float())
        (losses * counts).sum().backward()
        finalize_model_grads([run.engine], num_tokens=counts.sum())
