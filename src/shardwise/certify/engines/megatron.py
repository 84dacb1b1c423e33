"""Megatron-Core's GPTModel with its local layers, loss, DistributedDataParallel, gradient finalization and norm.

Without CUDA, Transformer Engine and Apex: what Megatron-Core makes on "cuda" is made on the CPU here, torch's functions
stand in for fused kernels, and torch scales what is clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import megatron.core.parallel_state as groups
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.certify.adapter import EngineRun
from shardwise.certify.tiny import SEQ

name = "Megatron-Core"
needs = ("megatron-core", "torch")
axes, data = ("dp", "tp"), ("dp",)
space = {"dp": (1, 2, 4), "tp": (1, 2, 4), "sp": (0, 1), "gather": (0, 1)}
within = {"sp": "tp", "gather": "tp"}
variants = ("plain", "uneven", "tied", "frozen")
exact = False  # its loss is computed in float32
skips = ("resume",)  # saving starts two more processes per rank
CONFIG: dict[str, Any] = {}
"""More arguments of TransformerConfig, for adapters that import from this one."""
GROUPS: dict[int, dict[str, Any]] = {}
"""tp -> Megatron-Core's process groups: making them anew for every case would leave hundreds behind."""
PARTS = {
    "input_layernorm": ("norm1",), "self_attention.linear_qkv": ("q", "k", "v"), "self_attention.linear_proj": ("o",),
    "pre_mlp_layernorm": ("norm2",), "mlp.linear_fc1": ("up",), "mlp.linear_fc2": ("down",),
}  # fmt: skip
"""Of a layer: Megatron-Core's module -> the plain model's."""
ENDS = {
    "embedding.word_embeddings.weight": "table.weight", "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias", "output_layer.weight": "head.weight",
}  # fmt: skip


class OnCPU(TorchFunctionMode):
    """Tensors on the CPU where a GPU is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is Tensor.cuda else func(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    no_fork = patch.object(CudaRNGStatesTracker, "fork", lambda *words: nullcontext())  # there is no dropout
    with OnCPU(), patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")), no_fork:
        yield


def use_groups(tp: int) -> None:
    if tp not in GROUPS:
        groups.destroy_model_parallel()
        groups.initialize_model_parallel(tensor_model_parallel_size=tp)
        GROUPS[tp] = {key: value for key, value in vars(groups).items() if key[0] == "_" != key[1]}
    vars(groups).update(GROUPS[tp])


def names_of(name: str) -> list[str]:
    """Those of the plain model that one of Megatron-Core's parameters has."""
    if name in ENDS:
        return [ENDS[name]]
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return [f"blocks.{layer}.{part}.{leaf}" for part in PARTS.get(module, (module,))]


def build_gpt(config: Any, **options: Any) -> Any:
    return GPTModel(config, get_gpt_layer_local_spec(), **options)


class Split:
    """The model behind Megatron-Core's DistributedDataParallel."""

    def __init__(self, model: Any, layout: dict[str, Any]) -> None:
        self.tp, self.dims = layout.get("tp", 1), dict[int, int | None]()
        use_groups(self.tp)
        width, layers = model.table.weight.shape[1], len(model.blocks)
        config = TransformerConfig(
            num_layers=layers, hidden_size=width, ffn_hidden_size=width, num_attention_heads=width // 4,
            hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=self.tp, bias_dropout_fusion=False,
            sequence_parallel=bool(layout.get("sp")), calculate_per_token_loss=True, use_cpu_initialization=True,
            params_dtype=torch.float32, gradient_accumulation_fusion=False, **CONFIG,
        )  # fmt: skip
        self.gpt = build_gpt(
            config, vocab_size=len(model.table.weight), max_sequence_length=SEQ,
            share_embeddings_and_output_weights=model.head.weight is model.table.weight,
            parallel_output=not layout.get("gather"),
        )  # fmt: skip
        plain = dict(model.named_parameters())
        self.gpt.embedding.position_embeddings.weight.requires_grad_(False).data.copy_(model.positions)
        for name, p in self.named():
            parts = [plain[part] for part in names_of(name)]
            whole = parts[0] if len(parts) == 1 else torch.stack([part.unflatten(0, (-1, 4)) for part in parts], 1)
            p.data.copy_(self.split(p, whole.reshape(-1, *p.shape[1:]) if len(parts) > 1 else whole))
            p.requires_grad_(parts[0].requires_grad)
        self.ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), self.gpt)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.gpt.named_parameters() if "position" not in name)

    def split(self, p: Tensor, whole: Tensor) -> Tensor:
        """This rank's part; notes the dimension that is split."""
        dim = next((d for d, (a, b) in enumerate(zip(p.shape, whole.shape, strict=True)) if a != b), None)
        self.dims[id(p)] = dim
        return whole if dim is None else whole.chunk(self.tp, dim)[groups.get_tensor_model_parallel_rank()]

    def whole(self, p: Tensor, tensor: Tensor) -> Tensor:
        """The parts of all tensor-parallel ranks."""
        dim = self.dims[id(p)]
        if dim is None:
            return tensor.detach().clone()
        parts = [torch.empty_like(tensor) for _ in range(self.tp)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=groups.get_tensor_model_parallel_group())
        return torch.cat(parts, dim)

    def plain(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Megatron-Core's names and shards to the plain model's."""
        result: dict[str, Tensor] = {}
        for name, p in self.named():
            if name in values:
                names, whole = names_of(name), self.whole(p, values[name])
                parts = whole.unflatten(0, (-1, len(names), 4)).unbind(1) if len(names) > 1 else (whole,)
                result |= {n: part.reshape(-1, *whole.shape[1:]) for n, part in zip(names, parts, strict=True)}
        return result


def parallelize(model: nn.Module, layout: dict[str, Any]) -> Split:
    with on_cpu():
        return Split(model, layout)


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    """Sums over this rank's labels, which Megatron-Core divides by all that count."""
    split = run.engine
    use_groups(split.tp)
    with on_cpu():
        positions, counts = torch.arange(SEQ).expand_as(ids), labels != -100
        losses = split.ddp(ids, positions, None, labels=labels.clamp(min=0))
        loss = (losses * counts).sum()
        loss.backward()
        finalize_model_grads([split.ddp], num_tokens=counts.sum())
    return loss.item() / tokens


def gradients(run: EngineRun) -> dict[str, Tensor]:
    return run.engine.plain({n: p.main_grad for n, p in run.engine.named() if p.requires_grad})


def parameters(run: EngineRun) -> dict[str, Tensor]:
    return run.engine.plain(dict(run.engine.named()))


def optimizer(run: EngineRun, lr: float, betas: Any, eps: float, weight_decay: float) -> Any:
    config = OptimizerConfig(
        optimizer="adam", lr=lr, adam_beta1=betas[0], adam_beta2=betas[1], adam_eps=eps, weight_decay=weight_decay,
        clip_grad=run.most,
    )  # fmt: skip
    with on_cpu():
        return get_megatron_optimizer(config, [run.engine.ddp])


def clip(run: EngineRun, most: float) -> float:
    """Megatron-Core's norm; torch scales, since Megatron-Core's function takes CUDA tensors alone."""
    with on_cpu():
        run.optimizer.prepare_grads()
        norm = run.optimizer.get_grad_norm()
    trained = [p for _, p in run.engine.named() if p.requires_grad]
    nn.utils.clip_grads_with_norm_(trained, most, torch.tensor(norm), foreach=False)
    return float(norm)


def step(run: EngineRun) -> None:
    with on_cpu():
        run.optimizer.step_with_ready_grads()
        run.optimizer.zero_grad()
        run.engine.ddp.zero_grad_buffer()
