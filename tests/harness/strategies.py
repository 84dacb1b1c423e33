"""hypothesis strategies: models, and layouts that suit them."""

from typing import Any

from hypothesis import strategies as st

from shardwise.layout import Layout, Workload
from shardwise.layout.keys import CHOICES, SERVED
from shardwise.layout.keys import KEYS as TABLE
from shardwise.layout.legality import valid_tp
from shardwise.model import ModelConfig

KEYS = ("sync", "outer", "moments")
"""Choices of a layout that `syncs` draws."""
ORDERS = ("pp-dp-cp-tp", "dp-pp-cp-tp", "tp-cp-dp-pp", "cp-tp-pp-dp")


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small runnable decoders of both kinds; nothing needs to divide anything but heads."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    shared = {
        "name": "random",
        "vocab": draw(st.integers(2, 40)),
        "hidden": draw(st.integers(2, 24)),
        "layers": draw(st.integers(1, 4)),
        "heads": kv_heads * draw(st.integers(1, 4)),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "ffn": draw(st.integers(1, 40)),
        "max_positions": 64,
        "tied": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return ModelConfig(**shared, qk_norm=draw(st.booleans()), bias=draw(st.sampled_from(["none", "qkv"])))
    return ModelConfig(
        **shared,
        norm="layernorm",
        positions=draw(st.sampled_from(["rope", "learned"])),
        activation="gelu",
        gated=False,
        bias="all",
        parallel_residual=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn, model: ModelConfig) -> Layout:
    dp, tp = draw(st.integers(1, 8)), draw(st.sampled_from([t for t in valid_tp(model) if t <= 8]))
    zero = draw(st.integers(0, 3))
    divisors = [n for n in range(2, dp) if dp % n == 0]
    return Layout(
        dp=dp,
        tp=tp,
        zero=zero,
        shard=draw(st.sampled_from([0, *divisors])) if zero else 0,
        sp=draw(st.booleans()) if tp > 1 else False,
        micro=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(ORDERS)),
        **{key: draw(st.sampled_from(CHOICES[key])) for key in ("recompute", "attention", "precision", "grads")},
    )


@st.composite
def split_models(draw: st.DrawFn) -> tuple[ModelConfig, Layout, Workload]:
    model = draw(models())
    layout = draw(layouts(model))
    batch = layout.dp * layout.micro * draw(st.integers(1, 3))
    workload = Workload(seq=layout.tp * draw(st.integers(1, 3)), batch=batch, isolate_documents=draw(st.booleans()))
    return model, layout, workload


@st.composite
def syncs(draw: st.DrawFn, dp: int, tp: int, alone: bool) -> dict[str, Any]:
    """Keys of a way in which replicas agree. alone: whether nothing but dp and tp splits the model."""
    sync = draw(st.sampled_from(["allreduce", "allreduce", "local", *(SERVED if alone else ())]))
    if sync == "local":
        return {
            "sync": sync,
            "every": draw(st.integers(1, 50)),
            "outer": draw(st.sampled_from(CHOICES["outer"])),
            "outer_bits": draw(st.sampled_from(TABLE["outer_bits"].choices)),
            "moments": draw(st.sampled_from(CHOICES["moments"])),
            "replicas": draw(st.sampled_from([n for n in range(dp + 1) if n == 0 or dp % n == 0])),
        }
    if sync not in SERVED:
        return {}
    servers = draw(st.sampled_from(["1", f"{dp * tp}", "1:own", "3:own"]))
    special = {"ps": ("backup", st.integers(0, dp - 1)), "ssp": ("staleness", st.integers(0, 4))}
    name, values = special.get(sync, ("damped", st.booleans()))
    return {"sync": sync, "servers": servers, name: draw(values)}


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    """Layouts that contradict nothing, whatever the model; runnable here or not."""
    dp, tp, pp, cp = (draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in range(4))
    virtual = draw(st.integers(1, 3)) if pp > 1 else 1
    zero = draw(st.integers(0, 3))
    sync = draw(syncs(dp, tp, alone=zero == 0 and pp == cp == 1))
    data = Layout(dp=dp, cp=cp, **({} if sync.get("sync") in SERVED else sync)).data_ranks
    divisors = [n for n in range(2, data + 1) if data % n == 0]
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4) if (data * tp) % n == 0]))
    etp = draw(st.sampled_from([n for n in (0, 1, tp) if n < 2 or data % ep == 0]))
    sp = draw(st.booleans()) if tp > 1 else False
    words = {key: draw(st.sampled_from(values)) for key, values in CHOICES.items() if key not in KEYS}
    words["offload"] = draw(st.sampled_from(["none", "none", "cpu", "nvme", "cpu:0.5", "nvme:0.25"]))
    if sync.get("sync") in SERVED:
        ep, etp, data, words["offload"] = 1, 0, 1, "none"
    if words["offload"] == "none" or zero < 3:
        words["offload_params"] = "none"
    if tp == 1 or sp:
        words["tpkind"] = "megatron"
    shard = draw(st.sampled_from([0, *divisors])) if zero else 0
    among = shard or data
    inside = [n for n in range(2, among) if among % n == 0]
    qgz = draw(st.booleans()) if zero else False
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, virtual=virtual, zero=zero, etp=etp, sp=sp, ep=ep, shard=shard,
        hpz=draw(st.sampled_from([0, *inside])) if zero == 3 else 0, qwz=draw(st.booleans()) if zero == 3 else False,
        qgz=qgz, feedback=draw(st.booleans()) if qgz else False,
        stages=draw(st.sampled_from([(), tuple(draw(st.integers(1, 30)) for _ in range(pp * virtual))])),
        micro=draw(st.integers(1, 8)), order=draw(st.sampled_from(ORDERS)), **words, **sync,
    )  # fmt: skip  # fmt: skip
