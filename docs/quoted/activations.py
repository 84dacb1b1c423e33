"""Memory of activations, and what recomputation saves and costs."""

from __future__ import annotations

from quoted.showing import Inputs, Samples, Values, topic
from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import TP, named
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.flops import hardware_flops_per_token, training_flops_per_token
from shardwise.predict.memory.activations import saved_items
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.schedule.closed_forms import CLOSED_FORMS
from shardwise.validation.scoreboard.memory import BLOCK_ITEMS, Recompute, block_activations

shows = topic(2, "Memory of activations, recomputation")
GB, TB = 1e9, 1e12


def gpt(hidden: int, layers: int = 1, heads: int = 0) -> ModelConfig:
    """A model of GPT-3's shape without dropout of probabilities, heads of 128 unless given."""
    return get("gpt3-175b").replace(
        hidden=hidden, layers=layers, heads=heads or hidden // 128, kv_heads=0, head_dim=0, ffn=4 * hidden
    )


def plan_of(model: ModelConfig, layout: str, seq: int, batch: int = 1) -> UnitPlan:
    """What a rank of a layout does."""
    return unit_plan(model, Layout.parse(layout), Workload(seq=seq, batch=batch), backend="nccl")


def residual_bytes(hidden: int, layers: int, seq: int, batch: int) -> int:
    """Bytes of the blocks' inputs, which is what full recomputation keeps."""
    model = get("llama-3-70b").replace(hidden=hidden, layers=layers, heads=hidden // 128, head_dim=128)
    plan = plan_of(model, f"micro={batch},recompute=full", seq, batch)
    kept = (saved_items(plan, Sizes.of(plan), f"blocks.{i}") for i in range(layers))
    return sum(sum(items.values()) for items in kept)


def activation_bytes(
    model: ModelConfig,
    micro: int,
    seq: int,
    tp: int = 1,
    sp: bool = False,
    recompute: Recompute = "none",
    pp: int = 1,
    virtual: int = 1,
) -> float:
    """Bytes of saved activations of the first stage, which holds as many micro-batches as there are stages, and
    1 + (pp - 1) / (pp x virtual) times that when interleaved."""
    held = model.layers * (1 + (pp - 1) / (pp * virtual) if virtual > 1 else 1)
    return held * block_activations(model, micro, seq, tp, sp, recompute)


@shows(
    "act-residual",
    "predict.memory.activations.saved_items",
    text="{gb:.3g} GB, which is what recompute=full keeps of the blocks",
)
def _residual(inputs: Inputs) -> Values:
    return {"gb": residual_bytes(inputs["h"], inputs["layers"], inputs["s"], inputs["b"]) / GB}


@shows("act-residual-32k", "predict.memory.activations.saved_items", text="{gb:.1f} GB ({gib:.0f} GiB)")
def _residual_32k(inputs: Inputs) -> Values:
    held = residual_bytes(4096, 32, 32768, 16)
    return {"gb": held / GB, "gib": held / 2**30}


@shows(
    "act-12x",
    "validation.scoreboard.memory.block_activations",
    text="{unfused_gb:.1f} GB unfused ({unfused:.0f} times the residual stream), {flash_gb:.0f} GB with FlashAttention "
    "({flash:.0f} times)",
)
def _twelve_times(inputs: Inputs) -> Values:
    model, layers, term = gpt(4096, heads=32), 32, residual_bytes(4096, 32, 2048, 16)
    unfused = layers * block_activations(model, 16, 2048)
    flash = layers * block_activations(model, 16, 2048, recompute="selective")
    sizes = [(1, 2048), (16, 2048), (4, 8192)]
    whole: Samples = [({"s": s, "b": b, "h": 4096, "a": 32}, block_activations(model, b, s)) for b, s in sizes]
    fused: Samples = [({"s": s, "b": b, "h": 4096}, block_activations(model, b, s, recompute="selective"))
                      for b, s in sizes]  # fmt: skip
    return {
        "formula": [whole, fused],
        "unfused_gb": unfused / GB,
        "flash_gb": flash / GB,
        "unfused": unfused / term,
        "flash": flash / term,
    }


@shows(
    "act-per-layer", "validation.scoreboard.memory.block_activations", text="{bytes:,.0f} bytes = {gib:.2f} GiB a layer"
)
def _per_layer(inputs: Inputs) -> Values:
    held = block_activations(gpt(inputs["h"], heads=inputs["a"]), inputs["b"], inputs["s"])
    return {"bytes": held, "gib": held / 2**30}


@shows(
    "act-itemised",
    "validation.scoreboard.memory.BLOCK_ITEMS",
    text="attention {attention}, MLP {mlp} ({items}), two layer norms {layernorm}: {sum} s b h bytes",
)
def _itemised(inputs: Inputs) -> Values:
    parts = {name: sum(items.values()) for name, items in BLOCK_ITEMS.items()}
    items = " + ".join(str(size) for size in BLOCK_ITEMS["mlp"].values())
    return parts | {"sum": sum(parts.values()), "items": items}


@shows(
    "act-175b-batch",
    "quoted.activations.activation_bytes",
    text="{tb_unfused:.0f} TB unfused, {tb_flash:.0f} TB with FlashAttention, {gb_one_sequence:.0f} GB for one "
    "sequence",
)
def _whole_batch(inputs: Inputs) -> Values:
    model = gpt(inputs["h"], inputs["layers"], inputs["a"])
    sequences = inputs["tokens"] / inputs["s"]
    one = activation_bytes(model, 1, inputs["s"])
    flash = activation_bytes(model, 1, inputs["s"], recompute="selective")
    return {
        "tb_unfused": sequences * one / TB,
        "tb_flash": sequences * flash / TB,
        "gb_one_sequence": one / GB,
    }


@shows(
    "act-128k",
    "predict.memory.activations.saved_items",
    "quoted.activations.activation_bytes",
    text="{residual_gb:.0f} GB of residual stream alone, {all_tb_flash:.2f} TB of all with FlashAttention",
)
def _long_sequence(inputs: Inputs) -> Values:
    model = gpt(inputs["h"], inputs["layers"])
    return {
        "residual_gb": residual_bytes(inputs["h"], inputs["layers"], inputs["s"], 1) / GB,
        "all_tb_flash": activation_bytes(model, 1, inputs["s"], recompute="selective") / TB,
    }


@shows(
    "sp-activation",
    "validation.scoreboard.memory.block_activations",
    "predict.traffic.ledger.predict_ledger",
    text="a layer of 175B at t=8: {without_gb:.2f} GB a rank without, {with_gb:.2f} GB with it; in forward both send "
    "{forward_mb:.0f} MB a layer and rank, in backward {backward_mb:.0f} MB without, {backward_sp_mb:.0f} MB with it, "
    "since inputs are gathered again (Megatron-LM does so, too, beside computation)",
)
def _sequence_parallel(inputs: Inputs) -> Values:
    model, layouts = gpt(12288, heads=96), ("tp=8", "tp=8,sp")
    samples: Samples = []
    for t in (2, 4, 8):
        held = block_activations(model, 1, 2048, tp=t, sp=True)
        samples.append(({"s": 2048, "b": 1, "h": 12288, "t": t, "a": 96}, held))
    (forward, backward), (forward_sp, backward_sp) = (_sent_in_block(model, layout) for layout in layouts)
    return {
        "formula": samples,
        "without_gb": block_activations(model, 1, 2048, tp=8) / GB,
        "with_gb": samples[-1][1] / GB,
        "forward_ratio": forward_sp / forward,
        "forward_mb": forward / 1e6,
        "backward_mb": backward / 1e6,
        "backward_sp_mb": backward_sp / 1e6,
    }


def _sent_in_block(model: ModelConfig, layout: str) -> list[float]:
    """Bytes that a rank sends for the tp collectives of the first block by rings, in forward and in backward."""
    sent = {"forward": 0.0, "backward": 0.0}
    plan = plan_of(model.replace(attention_dropout=0.0), layout, 2048)
    for row in predict_ledger(plan):
        if named(row.axes) == TP and row.unit == "blocks.0" and row.elements > model.hidden**2 // 64:
            op = row.op.removesuffix("_into").replace("_", "-")
            _, times, _ = CLOSED_FORMS[op, "ring"].factors(plan.layout.tp)
            sent[row.phase] += times * row.payload_bytes
    return list(sent.values())


@shows(
    "checkpointing-o1",
    "validation.scoreboard.memory.block_activations",
    "predict.memory.activations.saved_items",
    text="recompute=full keeps {per_block_mb:.1f} MB for each of 32 layers of 4096, recompute=input {input_mb:.1f} MB "
    "in all",
)
def _checkpointing(inputs: Inputs) -> Values:
    samples: Samples = []
    for h in (4096, 8192):
        samples.append(({"s": 2048, "b": 2, "h": h}, block_activations(gpt(h), 2, 2048, recompute="full")))
    kept = {}
    for how in ("full", "input"):
        plan = plan_of(get("llama-2-7b"), f"recompute={how}", 2048)
        blocks = (saved_items(plan, Sizes.of(plan), part) for part in plan.of_kind("block"))
        kept[how] = sum(sum(items.values()) for items in blocks)
    return {
        "per_layer_bytes": samples,
        "per_block_mb": kept["full"] / 32 / 1e6,
        "input_mb": kept["input"] / 1e6,
        "layers_ratio": kept["full"] / kept["input"],
    }


@shows(
    "recompute-cost",
    "model.flops.hardware_flops_per_token",
    text="175B: {full_flops_ratio:.3f} times the operations with recompute=full, {selective:.3f} with selective",
)
def _recompute_cost(inputs: Inputs) -> Values:
    model = get("megatron-175b")
    once = training_flops_per_token(model, 2048)
    return {
        "full_flops_ratio": hardware_flops_per_token(model, 2048, "full") / once,
        "selective": hardware_flops_per_token(model, 2048, "selective") / once,
    }
