"""Mixtral: Llama with a mixture of experts in every block."""

from dataclasses import replace
from typing import Any

from shardwise.codec import keyed
from shardwise.model.config import Experts, ModelConfig
from shardwise.model.families.common import llama_like
from shardwise.model.families.family import Family
from shardwise.model.families.llama import NAMES, llama_lacks, write_llama
from shardwise.model.fields import Fields, full_attention
from shardwise.model.foreign import ForeignNames


def expert_names(names: ForeignNames, block: str, gate: str, up: str, down: str) -> ForeignNames:
    """Names of a family with a mixture in the module `block`, whose experts' maps are `gate`, `up` and `down`."""
    gate, up, down = (f"{block}.experts.{{expert}}.{name}.weight" for name in (gate, up, down))
    return replace(
        names,
        names={**names.names, "mlp.router": f"{block}.gate"},
        whole={"mlp.experts.gate": gate, "mlp.experts.up": up, "mlp.experts.down": down},
        stacked={
            "mlp.gate.weight": (f"{block}.gate.weight",),
            "mlp.experts.gate_up_proj": (gate, up),
            "mlp.experts.down_proj": (down,),
        },
    )


def read_experts(f: Fields, count: int, active: int, ffn: int, **more: Any) -> Experts:
    """The experts of a `config.json`. more: other fields of `Experts`."""
    if active > count:
        raise f.error(f"num_experts_per_tok={active} is more than the {count} experts that there are")
    return Experts(count, active, ffn, **more)


def balance_loss(f: Fields) -> float:
    """Coefficient of the balance loss in Mixtral and Qwen3-MoE."""
    return f.number("router_aux_loss_coef", default=0.001, positive=False)


def expert_lacks(c: ModelConfig) -> dict[str, bool]:
    """Features of neither Mixtral nor Qwen3-MoE -> whether a model has them."""
    e = c.experts
    assert e
    return llama_lacks(c) | {
        "biases": c.bias != "none",
        "shared experts": e.shared > 0,
        "dense layers before its experts": e.dense_layers > 0,
        "bias or sigmoid in its router": e.router_bias or e.scoring != "softmax",
        "groups of experts": e.active_groups < e.groups,
        "factor of its experts' weights": e.scale != 1.0,
    }


def _read(f: Fields) -> dict[str, Any]:
    config = llama_like(f, max_positions=131072, kv_heads=8, eps=1e-5, theta=1e6)
    full_attention(f, config, f.integer("sliding_window", default=None))
    f.must_be("router_jitter_noise", 0.0, why="noise on the router's input in training")
    count = f.integer("num_local_experts", "num_experts", default=8)
    active = f.integer("num_experts_per_tok", default=2)
    return config | {"experts": read_experts(f, count, active, config["ffn"], balance_loss=balance_loss(f))}


def _write(c: ModelConfig) -> dict[str, Any]:
    keys = "intermediate_size=ffn num_local_experts=count num_experts_per_tok=active router_aux_loss_coef=balance_loss"
    return write_llama(c) | keyed(c.experts, keys) | {"sliding_window": None}


def _lacks(c: ModelConfig) -> dict[str, bool]:
    assert c.experts
    return expert_lacks(c) | {
        "query and key norms": c.qk_norm,
        "weights of experts without their sum as divisor": not c.experts.normalized,
        "feed-forward width beside its experts'": c.ffn != c.experts.ffn,
    }


MIXTRAL = Family(
    "mixtral",
    fits=lambda c: c.experts is not None,
    read=_read,
    module="llama",
    harmless=frozenset({"output_router_logits"}),
    names=expert_names(NAMES, "block_sparse_moe", "w1", "w3", "w2"),
    architecture="MixtralForCausalLM",
    write=_write,
    lacks=_lacks,
)
