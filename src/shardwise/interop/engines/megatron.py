"""Megatron-LM's pipeline stages, and the model that its arguments describe."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.fields import ConfigFields
from shardwise.layout import Layout, pipeline
from shardwise.model import ModelConfig
from shardwise.model.config import Experts, LatentAttention, RopeScaling, YarnScaling
from shardwise.schedule.pipeline.plan import StageLayers

_OTHERS = (
    "heterogeneous_layers_config_path", "hybrid_layer_pattern", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups",
    "mamba_state_dim", "is_hybrid_model",
)  # fmt: skip
"""Flags of models that are not described here, with the flags that belong to them."""


_YARN = (4096, 32.0, 1.0)
"""Positions before the stretching, and both bounds, of YaRN beside latent attention, which has no flags for them."""


def derive(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """Stages of the pipeline, and the model. Raises `UserError` for layers that cannot be divided so, and for sizes
    that contradict each other."""
    words = _listed(names, fields) if names["listed"] else _divided(names, fields)
    return words | {"described": _described(names, fields)}


def _divided(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    pp, layers, virtual = names["pp"], names["num_layers"], names["virtual_ranks"]
    if each := names["layers_each"]:
        if not layers:
            raise UserError("--num-layers-per-virtual-pipeline-stage needs --num-layers")
        if layers % (pp * each):
            raise UserError(f"--num-layers {layers} is not a multiple of {pp} stages x {each} layers a virtual stage")
        virtual = layers // (pp * each)
    ends = names["first_layers"], names["last_layers"]
    words: dict[str, Any] = {"virtual": virtual, "schedule": "interleaved"} if virtual > 1 and pp > 1 else {}
    stages = pp * max(1, virtual)
    embedding, loss = (int(names[f"account_for_{end}_in_pipeline_split"]) for end in ("embedding", "loss"))
    if any(ends) and layers and pp > 1:
        words["stages"] = _uneven(layers, stages, *ends)
    elif layers and (layers + embedding + loss) % stages:
        flag = "--decoder-last-pipeline-num-layers, or a --pipeline-model-parallel-layout"
        raise UserError(f"--num-layers {layers} cannot be divided by {stages} stages without {flag}")
    elif layers and pp > 1 and (embedding or loss):
        words["stages"] = StageLayers.weighed(layers, stages, (embedding, loss)).layers
    elif pp > 1 and (embedding or loss):
        fields.say("facts", "--account-for-..-in-pipeline-split without --num-layers: stages are taken as even")
    return words


def _listed(names: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """Stages of a list such as Et*21|t*20|(t|)*2t*19L: t is a layer, E the embedding, L the loss. Another text is a
    fact, and counts as even stages."""
    text, pp, layers = names["listed"], names["pp"], names["num_layers"]
    # Megatron-LM writes repetitions as (tt|)*30 or t*21.
    full = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda match: match[1] * int(match[2]), text)
    full = re.sub(r"(\w)\*(\d{1,4})", lambda match: match[1] * int(match[2]), full.replace(",", ""))
    counts = tuple(stage.count("t") for stage in full.split("|"))
    if set(full) - set("EtL|") or len(counts) % pp or (layers and sum(counts) != layers) or pp == 1:
        fields.say("facts", f"--pipeline-model-parallel-layout {text}: taken as even")
        return {}
    virtual = len(counts) // pp
    return {"stages": counts} | ({"virtual": virtual, "schedule": "interleaved"} if virtual > 1 else {})


def _uneven(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage where the first or the last has a number of its own. Raises `UserError` where the rest
    cannot be divided."""
    middle = stages - bool(first) - bool(last)
    rest = layers - first - last
    if middle < 1 or rest < middle or rest % middle:
        raise UserError(f"{rest} layers between the first and the last stage cannot be divided by {middle} stages")
    return (*([first] if first else []), *[rest // middle] * middle, *([last] if last else []))


def written_stages(model: ModelConfig, layout: Layout) -> tuple[int | None, str | None]:
    """(Layers of a virtual stage, list of stages that are not even); None where there is none."""
    if layout.pp == 1:
        return None, None
    layers = pipeline.stages(model, layout).layers
    if len(set(layers)) == 1:
        return layers[0] if layout.virtual > 1 else None, None
    # E and L are the embedding and the loss, t a layer.
    words = [f"t*{n}" if n > 1 else "t" * n for n in layers]
    words[0], words[-1] = f"E{words[0]}", f"{words[-1]}L"
    return None, "|".join(words)


def beside_core(modules: Sequence[str]) -> tuple[str, ...]:
    """Modules that are recomputed beside attention's core."""
    return tuple(module for module in modules if module != "core_attn")


def others(fields: ConfigFields) -> str:
    """Flags of models that are not described here."""
    return ", ".join(fields.name(key) for key in _OTHERS if fields.given(key))


def _described(names: Mapping[str, Any], fields: ConfigFields) -> ModelConfig | None:
    """The model; None where its sizes are not there, or where it has layers of other kinds."""
    hidden, gated = names["hidden_size"], names["swiglu"]
    multiple = names["make_vocab_size_divisible_by"] * names["tp"]
    vocab = names["padded_vocab_size"] or -(-names["vocab_size"] // multiple) * multiple
    # Without a width of its own the feed-forward is 4h, or as many parameters with a gate (arguments.py).
    ffn = names["ffn_hidden_size"] or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    experts, known = _experts(names, fields, ffn)
    if names["others"]:
        fields.say("facts", f"its model is not described here ({names['others']}): --model names it")
    if names["others"] or not known or not (hidden and vocab and names["num_layers"] and names["num_attention_heads"]):
        return None
    positions = names["position_embedding_type"]
    if positions not in ("learned_absolute", "rope", "none"):
        raise UserError(f"--position-embedding-type {positions} is not known here; learned_absolute and rope are")
    latent, factor = None, names["rotary_scaling_factor"]
    if names["multi_latent_attention"]:
        keys = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        latent = LatentAttention(*(names[key] for key in keys))
    yarn = latent is not None and names["rope_type"] != "rope" and factor > 1
    return ModelConfig(
        "the model of these arguments",
        vocab,
        hidden,
        names["num_layers"],
        names["num_attention_heads"],
        ffn,
        names["max_position_embeddings"] or names["seq"] or 1,
        kv_heads=(names["num_query_groups"] or 1) if names["group_query_attention"] and not latent else 0,
        head_dim=0 if latent else names["kv_channels"],
        latent_attention=latent,
        rope_scaling=YarnScaling(factor, _YARN[0], mscale=names["mscale"]) if yarn else None,
        norm=names["normalization"],
        positions="learned" if positions == "learned_absolute" and not latent else "rope",
        activation="silu" if gated else "gelu",
        gated=gated,
        bias=("qkv" if names["add_qkv_bias"] else "none") if names["disable_bias_linear"] else "all",
        qk_norm=names["qk_layernorm"] and not latent,
        tied=not names["untie_embeddings_and_output_weights"],
        experts=experts,
    )


def _experts(names: Mapping[str, Any], fields: ConfigFields, ffn: int) -> tuple[Experts | None, bool]:
    """(Experts, whether they are all that the flags say). ffn: width of a dense feed-forward, and of an expert's where
    it has none of its own."""
    width, shared = names["moe_ffn_hidden_size"] or max(1, ffn), names["moe_shared_expert_intermediate_size"]
    layers = re.fullmatch(r"1|\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", names["moe_layer_freq"])
    if not names["num_experts"]:
        return None, True
    if shared % width or not layers:
        why = "layers in turns, or a shared expert of another width"
        fields.say("facts", f"its experts are not described here ({why}): --model names it")
        return None, False
    return Experts(
        names["num_experts"], names["moe_router_topk"], width, shared // width, dense_layers=int(layers[1] or 0),
        router_bias=names["moe_router_enable_expert_bias"], scoring=names["moe_router_score_function"],
    ), True  # fmt: skip


def layer_freq(model: ModelConfig) -> str | None:
    """Layers with experts as --moe-layer-freq; None where all have them."""
    dense = model.experts.dense_layers if model.experts else 0
    return f"([0]*{dense}+[1]*{model.layers - dense})" if dense else None


def written_rope(scaling: RopeScaling | YarnScaling, latent: LatentAttention | None) -> bool:
    """Whether the arguments scale rotary angles so: some of the numbers have no flags."""
    if isinstance(scaling, RopeScaling):
        low, high, positions = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
        return not latent and (low, high, positions) == (1.0, 4.0, 8192)
    return latent is not None and (scaling.original_max_positions, scaling.beta_fast, scaling.beta_slow) == _YARN
