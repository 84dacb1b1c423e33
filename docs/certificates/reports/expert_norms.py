"""NeMo Automodel issue 3816 (pull request 3817): gradient norms that leave out other ranks' experts.

Two experts on two ranks, all of them used by every token; the rest of the model is on both. Clipping is Automodel's.
`ep=2,mesh=0` calls it without the mesh of experts, which is what it computed before the fix.
"""

import torch
import torch._dynamo.utils  # before Automodel, whose stand-in for triton it would take for triton
import torch.distributed as dist
from nemo_automodel.components.training.utils import clip_grad_norm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.certify.tiny import Tiny, TinyBlock

name = "NeMo Automodel's clip_grad_norm"
needs = ("nemo-automodel", "torch")
axes, data = ("ep",), ()
space = {"ep": (1, 2), "mesh": (1, 0)}
variants, skips = ("plain",), ("resume",)


class Sum(torch.autograd.Function):
    """Over ranks: of outputs in the forward pass, or of gradients in the backward pass."""

    @staticmethod
    def forward(ctx, x, outputs):
        ctx.outputs = outputs
        x = x.clone()
        if outputs:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if not ctx.outputs:
            dist.all_reduce(gradient)
        return gradient, None


class Experts(nn.ModuleDict):
    """Those of this rank; in the plain model all."""

    def forward(self, x):
        split = len(self) == 1
        x = Sum.apply(x, False) if split else x
        y = sum(expert(x) for expert in self.values())
        return Sum.apply(y, True) if split else y


class ExpertBlock(TinyBlock):
    def forward(self, x):
        return super().forward(x) + self.experts(x)


def with_experts(variant):
    model = Tiny(variant)
    for block in model.blocks:
        block.__class__, block.experts = ExpertBlock, Experts({f"e{i}": nn.Linear(16, 16) for i in range(2)})
    return model


models = {"tiny with experts": with_experts}


def parallelize(model, layout):
    for block in model.blocks:
        del block.experts[f"e{1 - dist.get_rank()}"]
        block.experts._nemo_ep_local_expert_params = True
    model.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)) if layout.get("mesh", 1) else None
    return model


def clip(run, most):
    return float(clip_grad_norm(most, [run.model], moe_mesh=run.engine.mesh, ep_axis_name="ep", foreach=False))
