"""DeepSeek-V3: latent attention, experts with shared ones beside them. Counted and planned, not run here yet."""

from __future__ import annotations

from typing import Any

from shardwise.model.config import LatentAttention
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.mixtral import read_experts
from shardwise.model.fields import Fields, words


def _deepseek_v3(f: Fields) -> dict[str, Any]:
    latent = LatentAttention(
        q_rank=f.integer("q_lora_rank"),
        kv_rank=f.integer("kv_lora_rank", default=512),
        nope_head_dim=f.integer("qk_nope_head_dim", default=128),
        rope_head_dim=f.integer("qk_rope_head_dim", default=64),
        v_head_dim=f.integer("v_head_dim", default=128),
    )
    config = llama_like(f, max_positions=4096, counted=True)
    f.must_be("attention_bias", False, why="biases on the attention matrices alone")
    f.must_be("moe_layer_freq", 1, why="dense layers between the expert layers")
    experts = read_experts(
        f,
        count=f.integer("n_routed_experts", "num_local_experts"),
        active=f.integer("num_experts_per_tok"),
        ffn=f.integer("moe_intermediate_size"),
        shared=f.integer("n_shared_experts", default=0, least=0),
        dense_layers=f.integer("first_k_dense_replace", default=3, least=0),
        router_bias=True,
    )
    # transformers writes the rotated part as head_dim; a query head is that and the part without positions.
    head_dim = latent.nope_head_dim + latent.rope_head_dim
    return config | {"head_dim": head_dim, "latent_attention": latent, "experts": experts}


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    fits=lambda c: c.latent_attention is not None,
    read=_deepseek_v3,
    module="llama",
    harmless=words(
        """
        qk_head_dim rope_interleave routed_scaling_factor n_group topk_group topk_method norm_topk_prob
        scoring_func aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers
        output_router_logits quantization_config
        """
    ),
)
