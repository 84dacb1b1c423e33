"""Memory of weights, gradients and optimizer state, and how many devices it takes."""

from __future__ import annotations

from collections.abc import Mapping

from quoted.showing import Inputs, Samples, Values, topic
from quoted.tokens import stored_bytes
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint, count_parts
from shardwise.predict.memory.states import largest_model, least_devices, training_states, zero_table
from shardwise.predict.memory.step import OPTIMIZER_BYTES
from shardwise.report.step_report import DTYPE_BYTES

shows = topic(1, "Memory of weights, gradients and optimizer")
GB = 1e9
MARKETED = 80 * GB
"""An "80 GB" device as it is sold; what CUDA reports of it is in the catalog."""


@shows(
    "mem-16-bytes",
    "predict.memory.states.training_states",
    text="7B: {total_gb:g} GB = {weights_gb:g} weights + {gradients_gb:g} gradients + {optimizer_gb:g} optimizer; "
    "{wide_gb:g} GB with fp32 gradients",
)
def _sixteen_bytes(inputs: Inputs) -> Values:
    held = training_states(inputs["params"])
    return {
        "total_gb": held.total / GB,
        "weights_gb": held.weights / GB,
        "gradients_gb": held.gradients / GB,
        "optimizer_gb": held.optimizer / GB,
        "wide_gb": training_states(inputs["params"], gradient_bytes=4).total / GB,
    }


@shows("mem-largest-24gb", "predict.memory.states.largest_model", text="{billions:g}B parameters in 24 GB")
def _largest_on_24gb(inputs: Inputs) -> Values:
    params = largest_model(inputs["device_gb"] * GB)
    return {"params": params, "billions": params / 1e9}


@shows(
    "zero-table-7b-8gpu",
    "predict.zero_table",
    "shardwise estimate --params 7e9 --zero-table 8",
    text="{stages} GB",
)
def _zero_table_7b(inputs: Inputs) -> Values:
    table = zero_table(inputs["params"], [inputs["gpus"]])
    held = {str(stage): row[inputs["gpus"]] / GB for stage, row in table.items()}
    return held | {"stages": " / ".join(f"{gb:g}" for gb in held.values())}


@shows(
    "zero-table-7b-sweep",
    "predict.zero_table",
    "shardwise estimate --params 7e9 --zero-table 1,2,4,8,16",
    text="stage 3 on 1, 2, 4, 8, 16 GPUs: {stage3} GB",
)
def _zero_table_sweep(inputs: Inputs) -> Values:
    table = zero_table(inputs["params"], inputs["gpus"])
    formulas = {str(stage): _samples(inputs["params"], row) for stage, row in table.items()}
    return {"formula": formulas, "stage3": ", ".join(f"{held / GB:g}" for held in table[3].values())}


@shows("zero1-formula", "predict.zero_table", text="7B on 8 GPUs: {stage1:g} GB at stage 1, {stage2:g} GB at stage 2")
def _zero_1(inputs: Inputs) -> Values:
    table = zero_table(7e9, [2, 8, 64])
    return {"formula": _samples(7e9, table[1]), "stage1": table[1][8] / GB, "stage2": table[2][8] / GB}


@shows(
    "mem-175b",
    "predict.memory.states.training_states",
    "predict.memory.states.least_devices",
    text="{wg_gb:g} GB of weights and gradients, {opt_gb:,.0f} GB of optimizer, {total_gb:,.0f} GB: {min_gpus} GPUs",
)
def _memory_175b(inputs: Inputs) -> Values:
    held = training_states(175e9)
    return {
        "wg_gb": (held.weights + held.gradients) / GB,
        "opt_gb": held.optimizer / GB,
        "total_gb": held.total / GB,
        "min_gpus": least_devices(175e9, MARKETED),
    }


@shows(
    "mem-10b",
    "predict.memory.states.training_states",
    text="{weights_gb:g} GB of weights, {training_gb:g} GB in training",
)
def _memory_10b(inputs: Inputs) -> Values:
    held = training_states(10e9)
    return {"weights_gb": held.weights / GB, "training_gb": held.total / GB}


@shows(
    "optimizer-12x",
    "predict.memory.step.OPTIMIZER_BYTES",
    text="{bytes_per_parameter} bytes a parameter, {times_fp16_weights:g} times the 2-byte weights",
)
def _optimizer_bytes(inputs: Inputs) -> Values:
    item = OPTIMIZER_BYTES["bf16"]
    return {"bytes_per_parameter": item, "times_fp16_weights": item / DTYPE_BYTES["float16"]}


@shows(
    "mem-70b-112tb",
    "predict.memory.states.training_states",
    text="{all_tb:g} TB with gradients, {without_gradients_tb:g} TB without",
)
def _memory_70b(inputs: Inputs) -> Values:
    held = training_states(70e9)
    return {"all_tb": held.total / 1e12, "without_gradients_tb": (held.weights + held.optimizer) / 1e12}


@shows(
    "dp-8-copies",
    "predict.memory.states.training_states",
    text="{per_gpu_mb:g} MB a GPU and {total_gb:g} GB with all of AdamW's state in fp16; mixed precision: "
    "{mixed_mb:,.0f} MB and {mixed_gb:g} GB",
)
def _eight_copies(inputs: Inputs) -> Values:
    narrow, mixed = training_states(100e6, optimizer_bytes=2 * DTYPE_BYTES["float16"]), training_states(100e6)
    return {
        "per_gpu_mb": narrow.total / 1e6,
        "total_gb": 8 * narrow.total / GB,
        "mixed_mb": mixed.total / 1e6,
        "mixed_gb": 8 * mixed.total / GB,
    }


@shows("params-12h2", "model.parameters.count_parts", text="{billions:.1f}B, {blocks:.1f}B of them in the blocks")
def _parameters_of_gpt3(inputs: Inputs) -> Values:
    model = get("gpt3-175b").replace(layers=inputs["layers"], hidden=inputs["h"], vocab=inputs["vocab"])
    everything, blocks, _ = count_parts(model)
    return {"params": everything, "billions": everything / 1e9, "blocks": blocks / 1e9}


@shows("embed-50k", "model.parameters.blueprint", text="{millions:g}M parameters")
def _embedding(inputs: Inputs) -> Values:
    model = get("gpt2").replace(vocab=inputs["vocab"], hidden=inputs["h"])
    params = blueprint(model).table.numel
    return {"params": params, "millions": params / 1e6}


@shows("gpt4-table", "quoted.tokens.stored_bytes", text="{fp16:,.0f} / {int8:,.0f} / {int4:,.0f} GB")
def _weights_of_1800b(inputs: Inputs) -> Values:
    gb = [stored_bytes(1.8e12, dtype) / GB for dtype in ("float16", "int8", "int4")]
    return {"gb": gb, "fp16": gb[0], "int8": gb[1], "int4": gb[2]}


def _samples(params: float, row: Mapping[int, float]) -> Samples:
    return [({"P": params, "N": ranks}, held) for ranks, held in row.items()]
