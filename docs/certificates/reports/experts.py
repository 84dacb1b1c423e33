"""Megatron-LM pull request 5916: experts on fewer tensor-parallel ranks than the rest of the model.

Four experts of Megatron-Core's `SequentialMLP`, two per token, each of them whole on its rank (`etp=1`). With `ep=2` a
rank has two of them, without it each rank has all, for its part of the sequence. All maps have biases, or none has.
"""

import megatron.core.parallel_state as groups
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from torch import nn

from shardwise.certify.engines import megatron
from shardwise.certify.engines.megatron import *  # noqa: F403
from shardwise.certify.engines.megatron import CONFIG, PARTS, GPTModel
from shardwise.certify.tiny import Tiny, TinyBlock

space = {"dp": (1, 2, 4), "tp": (1, 2, 4), "sp": (0, 1), "ep": (1, 2, 4), "etp": (1, 2)}
within, variants = {"sp": "tp"}, ("plain", "uneven", "idle")
EXPERTS = 4
CONFIG |= {
    "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
PARTS["mlp.router"] = ("router",)
of_dense = megatron.names_of


def names_of(name):
    """A rank counts its experts from 0."""
    layer, experts, rest = name.partition(".mlp.experts.local_experts.")
    if not experts:
        return of_dense(name)
    number, module, leaf = rest.split(".")
    before = groups.get_expert_model_parallel_rank() * EXPERTS // groups.get_expert_model_parallel_world_size()
    return [f"blocks.{layer.split('.')[-1]}.experts.{before + int(number)}.{PARTS[f'mlp.{module}'][0]}.{leaf}"]


def build_gpt(config, layer, **options):
    return GPTModel(config, get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False), **options)


megatron.names_of, megatron.GPTModel = names_of, build_gpt
moe_utils.te_general_gemm = None  # Megatron-Core does not define it without Transformer Engine


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class ExpertBlock(TinyBlock):
    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        logits, chosen = self.router(y).topk(2)
        share = torch.zeros(*y.shape[:2], EXPERTS, dtype=y.dtype).scatter(2, chosen, logits.softmax(-1))
        return x + sum(share[..., i, None] * expert(y) for i, expert in enumerate(self.experts))


def with_biases(variant):
    model = Tiny(variant)
    for block in model.blocks:
        block.__class__, block.router = ExpertBlock, nn.Linear(16, EXPERTS)
        block.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        del block.up, block.down
    return model


def without_biases(variant):
    model = with_biases(variant)
    for linear in (item for item in model.modules() if isinstance(item, nn.Linear)):
        linear.bias = None
    return model


models = {"tiny with experts": without_biases, "tiny with biased experts": with_biases}


def parallelize(model, layout):
    CONFIG["add_bias_linear"] = model.blocks[0].router.bias is not None
    return megatron.parallelize(model, layout)
