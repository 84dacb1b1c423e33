"""DeepSpeed's JSON. Names: DeepSpeed 0.19. JSON has no comments: they are under a key that DeepSpeed ignores."""

from __future__ import annotations

import json
from typing import Any

from shardwise.interop.reading.known_keys import rows
from shardwise.interop.writing.canonical import SHARDING, defaults
from shardwise.interop.writing.old_limits import Changes, Limit, as_data, only, without
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.layout import Layout

# 0.19 has removed MiCS, which older files shard by.
KEYS = {key: option for key, option in rows("deepspeed", "layout").items() if key != "shard"}
CLIP = 1.0
COMMENT = "_comment"


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The file, and comments on what is the program's."""
    layout, batch = request.layout, request.workload.batch
    sums = layout.grads if layout.precision == "bf16" else "fp32"
    data: dict[str, Any] = {
        "train_batch_size": batch,
        KEYS["micro"]: layout.micro,
        "gradient_accumulation_steps": request.workload.micro_batches(layout),
        # Left out, DeepSpeed clips at 1.0 since 0.19 and did not before.
        "gradient_clipping": CLIP,
        KEYS["precision"]: {"enabled": layout.precision == "bf16"},
        "data_types": {KEYS["grads"]: sums},
        "communication_data_type": sums,
        "zero_optimization": _zero(layout),
        **_optimizer(request.workload.optimizer, layout),
    }
    comments = [f"start {layout.ranks} ranks: the file does not say how many; learning rate and data are the program's"]
    if layout.tp > 1:
        data["tensor_parallel"] = {KEYS["tp"]: layout.tp}
    if layout.cp > 1:
        data |= {KEYS["cp"]: layout.cp, "seq_parallel_communication_data_type": sums}
        comments.append("the program wraps attention in DistributedAttention and cuts sequences (Ulysses)")
    if layout.pp > 1:
        data["pipeline"] = {KEYS["pp"]: layout.pp}
        comments.append(f"the model is a PipelineModule with num_stages={layout.pp}, layers divided evenly")
    if "nvme" in (layout.offload_home, layout.offload_params):
        comments.append(f"nvme_path is {_NVME}: set the folder of your disk")
    return json.dumps(data, indent=2), comments


_NVME = "/local_nvme"


def _zero(layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {KEYS["zero"]: layout.zero}
    if layout.zero >= 1:
        # A pipeline switches overlap off, with a warning.
        zero |= {"overlap_comm": layout.pp == 1, "contiguous_gradients": True, "reduce_scatter": True}
    if layout.offload != "none":
        # A fraction is DeepSpeed's "ratio", which stage 3 alone has.
        share = {"ratio": layout.offload_fraction} if layout.offload_fraction < 1 else {}
        zero[KEYS["offload"]] = _home(layout.offload_home) | share
    if layout.offload_params != "none":
        zero[KEYS["offload_params"]] = _home(layout.offload_params)
    if layout.zero == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        zero |= {KEYS["hpz"]: layout.hpz} if layout.hpz else {}
        zero |= {KEYS["qwz"]: True} if layout.qwz else {}
        zero |= {KEYS["qgz"]: True} if layout.qgz else {}
    return zero


def _home(device: str) -> dict[str, Any]:
    return {"device": device, "pin_memory": True} | ({"nvme_path": _NVME} if device == "nvme" else {})


def _optimizer(name: str, layout: Layout) -> dict[str, Any]:
    """AdamW's settings are DeepSpeed's defaults; SGD is torch's, which ZeRO accepts on demand alone."""
    if name == "adamw":
        return {"optimizer": {"type": "AdamW", "params": {}}}
    data: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"momentum": 0.9 if name == "momentum" else 0.0}}}
    if layout.zero:
        data["zero_allow_untested_optimizer"] = True
    return data | ({"zero_force_ds_cpu_optimizer": False} if layout.offload != "none" else {})


def _offload_stage(layout: Layout) -> bool:
    fraction, nvme = 0 < layout.offload_fraction < 1, layout.offload_home == "nvme"
    return (fraction or nvme) and layout.zero < 3


def _whole(layout: Layout) -> Changes:
    return {"offload": "cpu"}


LIMITS = (
    only("precision", ("bf16", "fp32"), "fp32", "it has no fp64"),
    Limit("cpkind", lambda x: x.cp > 1 and x.cpkind != "ulysses", lambda _: {"cpkind": "ulysses"},
          "its sequence parallelism is Ulysses"),
    as_data("cp", lambda x: x.pp > 1, "its pipeline works without sequence parallelism", "cpkind"),
    as_data("tp", lambda x: x.pp > 1, "AutoTP works without a pipeline"),
    as_data("tp", lambda x: x.cp > 1, "AutoTP is written without sequence parallelism"),
    Limit("zero", lambda x: x.tp > 1 and x.zero == 3,
          lambda x: defaults(*SHARDING, "offload", "offload_params") | {"zero": 2}, "AutoTP works with stages 0 to 2"),
    Limit("zero", lambda x: x.pp > 1 and x.zero >= 2,
          lambda x: defaults(*SHARDING, "offload", "offload_params") | {"zero": 1},
          "its pipeline works with stages 0 and 1"),
    without("qgz", lambda x: x.zero < 3, "4-bit gradients need stage 3", "feedback"),
    Limit("offload", lambda x: x.offload != "none" and x.zero == 0, lambda _: {"zero": 1}, "it offloads with ZeRO"),
    Limit("offload", _offload_stage, _whole, "nvme and a fraction need stage 3"),
)  # fmt: skip

WRITER = EngineWriter(
    name="deepspeed",
    title="DeepSpeed",
    keys={"dp": "ranks / (tp x pp x cp)", "cpkind": KEYS["cp"]} | KEYS,
    left={
        "recompute": "the model's code decides what is recomputed (gradient_checkpointing_enable)",
        "attention": "the model's code chooses attention's kernel (attn_implementation=eager)",
        "compile": "the program compiles blocks",
        "algorithm": "NCCL chooses algorithms: see NCCL_ALGO",
        "node": "NCCL finds the nodes by itself",
    },
    limits=LIMITS,
    write=write,
    comment=lambda text, comments: json.dumps({COMMENT: comments, **json.loads(text)}, indent=2) + "\n",
    file="deepspeed.json",
    profile="unknown",
)
