"""Megatron-Core's GPTModel with its local layers, loss, DistributedDataParallel, gradient finalization and norm.

Without CUDA, Transformer Engine and Apex: what Megatron-Core makes on "cuda" is made on the CPU here, torch's functions
stand in for fused kernels and for Apex's norms, and torch scales what is clipped.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import megatron.core.parallel_state as groups
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.certify.adapter import EngineRun, joined
from shardwise.certify.tiny import SEQ

name, needs = "Megatron-Core", ("megatron-core", "torch")
axes, data = ("dp", "tp"), ("dp",)
space = {"dp": (1, 2, 4), "tp": (1, 2, 4), "sp": (0, 1), "gather": (0, 1)}
within = {"sp": "tp", "gather": "tp"}
variants, skips = ("plain", "uneven", "tied", "frozen"), ("resume",)  # saving starts two more processes per rank
exact = False  # its loss is computed in float32
CONFIG: dict[str, Any] = {}  # more arguments of TransformerConfig, for adapters that import from this one
SIZES = {"tp": "tensor_model_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
GROUPS: dict[str, dict[str, Any]] = {}  # sizes -> process groups: new ones for every case would leave hundreds behind
PARTS = {  # Megatron-Core's module, or a layer's -> the plain model's
    "embedding.word_embeddings": ("table",), "decoder.final_layernorm": ("norm",), "output_layer": ("head",),
    "input_layernorm": ("norm1",), "self_attention.linear_qkv": ("q", "k", "v"), "self_attention.linear_proj": ("o",),
    "pre_mlp_layernorm": ("norm2",), "mlp.linear_fc1": ("up",), "mlp.linear_fc2": ("down",),
}  # fmt: skip


class OnCPU(TorchFunctionMode):
    """Tensors on the CPU where a GPU is asked for, and a layout's process groups."""

    def __init__(self, layout: dict[str, Any]) -> None:
        super().__init__()
        self.sizes = {SIZES[key]: layout[key] for key in SIZES if key in layout}
        if (key := str(self.sizes)) not in GROUPS:
            groups.destroy_model_parallel()
            groups.initialize_model_parallel(**self.sizes)
            GROUPS[key] = {name: value for name, value in vars(groups).items() if name[0] == "_" != name[1]}
        vars(groups).update(GROUPS[key])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_gpu = str((kwargs := kwargs or {}).get("device")).startswith("cuda")
        return args[0] if func is Tensor.cuda else func(*args, **kwargs | ({"device": "cpu"} if on_gpu else {}))


def marked_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **words: Any) -> nn.LayerNorm:
    """torch's, with the mark by which ranks of sequence parallelism sum its gradients, as Apex's norm has it."""
    norm = nn.LayerNorm(hidden_size, eps)
    vars(norm.weight)["sequence_parallel"] = vars(norm.bias)["sequence_parallel"] = config.sequence_parallel
    return norm


WrappedTorchNorm.__new__ = marked_norm
CudaRNGStatesTracker.fork = lambda *words: nullcontext()  # there is no dropout
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def names_of(name: str) -> list[str]:
    """Those of the plain model that one of Megatron-Core's parameters has."""
    module, _, leaf = name.removeprefix("decoder.layers.").rpartition(".")
    layer, _, part = module.partition(".")
    outer, parts = ("", PARTS[module]) if module in PARTS else (f"blocks.{layer}.", PARTS.get(part, (part,)))
    return [f"{outer}{part}.{leaf}" for part in parts]


def parallelize(model: Any, layout: dict[str, Any]) -> Any:
    """Megatron-Core's model with the plain model's weights, whose names and shapes are noted at each parameter."""
    width, plain = model.table.weight.shape[1], dict(model.named_parameters())
    with OnCPU(layout) as cpu:
        config = TransformerConfig(
            num_layers=len(model.blocks), hidden_size=width, ffn_hidden_size=width, num_attention_heads=width // 4,
            hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, use_cpu_initialization=True,
            sequence_parallel=bool(layout.get("sp")), calculate_per_token_loss=True, **cpu.sizes, **CONFIG,
        )  # fmt: skip
        gpt = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=len(model.table.weight), max_sequence_length=SEQ,
            share_embeddings_and_output_weights=model.head.weight is model.table.weight,
            parallel_output=not layout.get("gather"),
        )  # fmt: skip
        gpt.embedding.position_embeddings.weight.requires_grad_(False).data.copy_(model.positions)
        for name, p in ((n, p) for n, p in gpt.named_parameters() if "position" not in n):
            p.names = names_of(name)
            whole = torch.stack([plain[n].detach().unflatten(0, (-1, 4)) for n in p.names], 1).flatten(0, 2)
            p.whole = whole.shape
            for dim, size in enumerate(p.shape):
                parts = whole.split(size, dim)
                whole = parts[groups.get_tensor_model_parallel_rank() % len(parts)]
            p.requires_grad_(plain[p.names[0]].requires_grad).data.copy_(whole)
        return DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)


def as_plain(tensors: list[tuple[Any, Tensor]]) -> dict[str, Tensor]:
    """Parameters, each with a tensor of its shape, to name in the plain model -> whole tensor."""
    group = groups.get_tensor_model_parallel_group()
    wholes = [(p.names, joined(tensor, p.whole, group).unflatten(0, (-1, len(p.names), 4))) for p, tensor in tensors]
    return {name: whole[:, i].flatten(0, 1) for names, whole in wholes for i, name in enumerate(names)}


def gradients(run: EngineRun) -> dict[str, Tensor]:
    return as_plain([(p, p.main_grad) for p in run.engine.parameters() if p.requires_grad])


def parameters(run: EngineRun) -> dict[str, Tensor]:
    return as_plain([(p, p) for p in run.engine.parameters() if hasattr(p, "names")])


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    """Sums over this rank's labels, which Megatron-Core divides by all that count."""
    with OnCPU(run.layout):
        counts = labels != -100
        losses = run.engine(ids, torch.arange(SEQ).expand_as(ids), None, labels=labels.clamp(min=0))
        (loss := (losses * counts).sum()).backward()
        finalize_model_grads([run.engine], num_tokens=counts.sum())
    return loss.item() / tokens


def optimizer(run: EngineRun, lr: float, betas: Any, eps: float, weight_decay: float) -> Any:
    words = {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_eps": eps, "weight_decay": weight_decay}
    with OnCPU(run.layout):
        return get_megatron_optimizer(OptimizerConfig(lr=lr, clip_grad=run.most, **words), [run.engine])


def clip(run: EngineRun, most: float) -> float:
    """Megatron-Core's norm; torch scales, since Megatron-Core's function takes CUDA tensors alone."""
    with OnCPU(run.layout):
        run.optimizer.prepare_grads()
        norm = float(run.optimizer.get_grad_norm())
    nn.utils.clip_grads_with_norm_(run.engine.parameters(), most, torch.tensor(norm), foreach=False)
    return norm


def step(run: EngineRun) -> None:
    with OnCPU(run.layout):
        run.optimizer.step_with_ready_grads()
        run.optimizer.zero_grad()
        run.engine.zero_grad_buffer()
