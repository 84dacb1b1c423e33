"""NeMo Automodel pull request 2995: a router without its gradient where experts' tokens are gathered.

Four experts on two ranks, each with other rows; the rest of the model is on both. Routing weights are gathered with
Automodel's `GroupedExperts`. `ep=2,weights=detached` gathers them without a gradient, as before the fix.
"""

import torch
import torch._dynamo.utils  # before Automodel, whose stand-in for triton it would take for triton
import torch.distributed as dist
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExperts
from nemo_automodel.components.moe.parallelizer import ExpertParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from shardwise.certify.adapter import backward as mean
from shardwise.certify.adapter import clip_mixed
from shardwise.certify.tiny import Tiny, TinyBlock

name = "NeMo Automodel's GroupedExperts"
needs = ("nemo-automodel", "torch")
axes = data = ("ep",)
space = {"ep": (1, 2), "weights": ("gathered", "detached")}
variants, skips, exact = ("plain", "uneven", "idle"), ("resume",), False  # it computes in float32
clip = clip_mixed
CONFIG = MoEConfig(
    n_routed_experts=4, n_shared_experts=0, n_activated_experts=2, n_expert_groups=1, n_limited_groups=1,
    train_gate=True, gate_bias_update_factor=0, aux_loss_coeff=0, score_func="softmax", route_scale=1, dim=16,
    inter_dim=16, moe_inter_dim=16, norm_topk_prob=False, expert_activation="relu2", dtype=torch.float32,
)  # fmt: skip


class Experts(GroupedExperts):
    """Automodel's where they are split; in the plain model every expert on every token."""

    detached = False

    def _gather_ep_inputs(self, x, mask, weights, indices, **words):
        return super()._gather_ep_inputs(x, mask, weights.detach() if self.detached else weights, indices, **words)

    def forward(self, x, mask, weights, indices):
        if isinstance(self.down_projs, DTensor):
            return super().forward(x, mask, weights, indices)
        y = torch.einsum("th,ehf->tef", x, self.gate_and_up_projs).relu().square()
        share = torch.zeros(len(x), 4, dtype=x.dtype).scatter(1, indices, weights)
        return torch.einsum("tef,efh,te->th", y, self.down_projs, share)


class ExpertBlock(TinyBlock):
    def forward(self, x):
        x = super().forward(x)
        flat = x.flatten(0, 1)
        weights, indices = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, torch.ones(len(flat), dtype=torch.bool), weights, indices).view_as(x)


def with_experts(variant):
    model = Tiny(variant)
    for block in model.blocks:
        block.__class__, block.router, block.experts = ExpertBlock, nn.Linear(16, 4), Experts(CONFIG)
        for p in block.experts.parameters():
            nn.init.normal_(p, 0, 0.3)
    return model


models = {"tiny with experts": with_experts}


def parallelize(model, layout):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    for block in model.float().blocks:
        block.experts.detached = layout.get("weights") == "detached"
        parallelize_module(block.experts, mesh, ExpertParallel())
    return model


def backward(run, ids, labels, tokens):
    """Experts' gradients have all ranks' rows in them; the others are averaged here, as by a data-parallel wrapper."""
    loss = mean(run, ids, labels, tokens)
    for p in run.model.parameters():
        if p.grad is not None and not isinstance(p, DTensor):
            dist.all_reduce(p.grad)
        if p.grad is not None:
            p.grad /= 2
    return loss
