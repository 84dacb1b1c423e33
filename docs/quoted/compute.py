"""Operations, how many devices they take, and which updates are lost in rounding."""

from __future__ import annotations

from quoted.campaign import devices_needed, rule_of_thumb
from quoted.rounding import rounded, spacing, surely_lost_below
from quoted.showing import Inputs, Samples, Values, topic
from shardwise.cluster import Cluster
from shardwise.layout import Layout, check
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.flops import (
    forward_flops_per_token,
    hardware_flops_per_token,
    training_flops_per_token,
)

shows = topic(6, "Operations, devices and numbers")


@shows("flops-175b", "quoted.campaign.rule_of_thumb", text="{flop:.3g} FLOP; with causal attention {counted:.3g}")
def _training_175b(inputs: Inputs) -> Values:
    counted = inputs["tokens"] * training_flops_per_token(get("gpt3-175b"), 2048)
    return {"flop": rule_of_thumb(inputs["params"], inputs["tokens"]), "counted": counted}


@shows("gpus-30-days", "quoted.campaign.devices_needed", text="{a100:.0f} A100, {v100:,.0f} V100")
def _thirty_days(inputs: Inputs) -> Values:
    flops = rule_of_thumb(175e9, 300e9)
    peaks = {"a100": Cluster.parse("1xA100").device.peak("bfloat16"), "v100": inputs["peak_v100"]}
    return {name: devices_needed(flops, peak, inputs["mfu"], inputs["days"]) for name, peak in peaks.items() if peak}


@shows("flops-mlp-layer", "model.flops.forward_flops_per_token", text="one matrix is {share:.3f} of a layer's products")
def _layer_flops(inputs: Inputs) -> Values:
    products: Samples = []
    attention: Samples = []
    for h, s in ((4096, 2048), (8192, 8192)):
        model = get("megatron-175b").replace(hidden=h, heads=h // 128, kv_heads=0, head_dim=0, ffn=4 * h)
        # Attention's operations grow with the sequence; what is left at none are the products with matrices.
        per_layer = [_blocks_forward(model, tokens) / model.layers for tokens in (s, 2 * s)]
        scores = per_layer[1] - per_layer[0]
        products.append(({"T": 1, "h": h}, per_layer[0] - scores))
        attention.append(({"T": 1, "s": s, "h": h}, scores))
    one = 2 * 4 * products[0][0]["h"] ** 2
    return {"layer_forward": [products, attention], "share": one / products[0][1]}


def _blocks_forward(model: ModelConfig, seq: int) -> int:
    """Forward operations of the blocks for a token, attention as the figure counts it: the whole square."""
    more = forward_flops_per_token(model.replace(layers=2 * model.layers), seq, causal=False)
    return more - forward_flops_per_token(model, seq, causal=False)


@shows("compute-65000x", "model.flops.forward_flops_per_token", text="{ratio:,.0f} times")
def _prefill_over_decode(inputs: Inputs) -> Values:
    model = get("llama-3-70b")
    return {"ratio": 32 * 2048 * forward_flops_per_token(model, 2048) / forward_flops_per_token(model, 2048)}


@shows("mtnlg-3d", "layout.Layout", "layout.check", text="{gpus:,} GPUs, {layers} layers a stage")
def _mt_nlg(inputs: Inputs) -> Values:
    layout, model = Layout.parse("tp=8,pp=35,dp=12"), get("mt-nlg-530b").replace(attention_dropout=0.0)
    check(layout, model)
    return {"gpus": layout.ranks, "layers": model.layers // layout.pp}


@shows(
    "ms-52-mfu",
    "model.flops.hardware_flops_per_token",
    text="163 TFLOP/s are {hfu:.0%} of 312 with what is recomputed, {mfu:.0%} without: {share:.2f} of it",
)
def _utilisation(inputs: Inputs) -> Values:
    model, peak = get("megatron-1t"), Cluster.parse("1xA100").device.peak("bfloat16")
    assert peak
    # Megatron-LM's 163 TFLOP/s count the whole square of attention.
    once = training_flops_per_token(model, 2048, causal=False)
    share = once / hardware_flops_per_token(model, 2048, "full", causal=False)
    hfu = 163e12 / peak
    return {"hfu": hfu, "mfu": hfu * share, "share": share}


@shows(
    "bf16-vanish",
    "quoted.rounding.spacing",
    "quoted.rounding.surely_lost_below",
    "quoted.rounding.rounded",
    text="neighbours are {least:.4f} to {most:.4f} of the weight apart, updates below "
    "{always_lost_below_relative:.6f} are always lost: a weight of 1 stays 1 through 1,000 updates of +{step:.5f}, an "
    "fp32 one reaches {master:.2f}",
)
def _lost_updates(inputs: Inputs) -> Values:
    step = 0.99 * surely_lost_below("bfloat16")
    weight = master = 1.0
    for _ in range(1000):
        weight, master = rounded(weight + step, "bfloat16"), rounded(master + step, "float32")
    least, most = spacing("bfloat16")
    return {
        "spacing_relative": [least, most],
        "always_lost_below_relative": surely_lost_below("bfloat16"),
        "demonstrated": weight == 1.0 and master > 2.0,
        "least": least,
        "most": most,
        "step": step,
        "master": master,
    }
