"""Hugging Face transformers' `DistributedConfig`: tensor and expert parallelism and FSDP2 by a model's own plans.

Its norms compute in float32 whatever the model's dtype is, so that the bound is that of float32.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig, checkpoint
from transformers.utils.logging import disable_progress_bar

from shardwise.certify.adapter import EngineRun, clip_mixed
from shardwise.certify.tiny import PADDED_VOCAB, VOCAB

name = "transformers DistributedConfig"
needs = ("transformers", "torch")
axes, data = ("dp_replicate", "fsdp", "tp"), ("dp_replicate", "fsdp")
space = {
    "fsdp": (1, 2, 4), "tp": (1, 2), "dp_replicate": (1, 2), "ep": (1, 2, 4),
    "exchange": ("auto", "all_to_all", "all_reduce"), "experts": ("eager", "batched_mm", "grouped_mm"),
}  # fmt: skip
within = {"exchange": "ep", "experts": "ep"}
exact = False
disable_progress_bar()
rebuilds = True
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def builder(kind: str, **more: Any) -> Any:
    def build(variant: str) -> nn.Module:
        vocab = PADDED_VOCAB if variant == "padded" else VOCAB
        config = AutoConfig.for_model(kind, **SIZES, **more, vocab_size=vocab, tie_word_embeddings=variant == "tied")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
        for name, p in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                nn.init.normal_(p, 1.0, 0.2)
            p.requires_grad_(not (variant == "frozen" and ("embed_tokens" in name or "layers.0." in name)))
        return model

    return build


models = {
    "tiny-llama": builder("llama"),
    "tiny-qwen3": builder("qwen3"),
    "tiny-mixtral": builder("mixtral", **EXPERTS),
    "tiny-qwen3-moe": builder("qwen3_moe", **EXPERTS, norm_topk_prob=True),
}
variants = ("plain", "uneven", "tied", "frozen", "padded", "idle")
clip = clip_mixed


def logits(engine: Any, ids: Tensor) -> Tensor:
    logits: Tensor = engine(input_ids=ids, use_cache=False).logits
    return logits


def parallelize(model: Any, layout: dict[str, Any]) -> nn.Module:
    """Save the model as a user's checkpoint, and load that split."""
    folder: list[Any] = [tempfile.mkdtemp(prefix="certify-")]
    dist.broadcast_object_list(folder, 0)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    config = DistributedConfig(
        tp_size=layout.get("tp", 1), fsdp_size=layout.get("fsdp", 1), ep_size=layout.get("ep", 1),
        dp_replicate_size=layout.get("dp_replicate", 1), ep_implementation=layout.get("exchange", "auto"),
    )  # fmt: skip
    experts = {"experts_implementation": layout["experts"]} if "experts" in layout else {}
    split = AutoModelForCausalLM.from_pretrained(
        folder[0], distributed_config=config, dtype=torch.float32, **experts
    ).train()
    for name, p in model.named_parameters():
        split.get_parameter(name).requires_grad_(p.requires_grad)
    return split


def save(run: EngineRun, folder: str) -> None:
    run.engine.save_pretrained(folder, distributed_checkpoint=True)
    checkpoint.save_optimizer_distributed(run.model, run.optimizer, f"{folder}/optimizer")


def load(run: EngineRun, folder: str) -> None:
    checkpoint._load_model_checkpoint_distributed(run.model, folder)
    checkpoint.load_optimizer_distributed(run.model, run.optimizer, f"{folder}/optimizer")
