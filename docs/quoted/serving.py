"""What one token moves and reads when a model is served on several devices."""

from __future__ import annotations

from quoted.activations import gpt
from quoted.collectives import measured_seconds, wire_seconds
from quoted.pipelines import of_total
from quoted.showing import Inputs, Values, topic
from quoted.tokens import (
    block_bytes,
    boundary_bytes,
    read_seconds,
    received_bytes,
    stored_bytes,
    summed_bytes,
)
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import lookup
from shardwise.layout import Layout
from shardwise.model.catalog import get
from shardwise.model.flops import matmul_parameters
from shardwise.model.parameters import count, count_parts
from shardwise.planner.strategies import traffic_ratio

shows = topic(5, "Serving: weights, and what a token moves")
GB, TRAFFIC, PRICE = 1e9, "quoted.tokens.summed_bytes", "schedule.price.price"
NVLINK, PCIE = 600 * GB, 64 * GB
"""Both directions together, as the claims count: NVLink of an A100, PCIe 4.0 x16."""


def ring_sums(nbytes: float, ranks: int, bandwidth: float) -> float:
    """Seconds on the wire of all-reduces of `nbytes` bytes in all."""
    return wire_seconds("all-reduce", "ring", nbytes, ranks, bandwidth)


@shows(
    "int-weights",
    "quoted.tokens.stored_bytes",
    "predict.time.serving.weight_bytes",
    text="fp16 {fp16} GB, int8 {int8} GB, int4 {int4} GB; as stored, with a scale of 16 bits and a zero of 4 for each "
    "group of 128 and tables in 16 bits, int4 {stored} GB; 405B in int4 in an H200 of {h200:.0f} GB: {fits}",
)
def _quantised_weights(inputs: Inputs) -> Values:
    from shardwise.predict.time.serving import ServingLayout, weight_bytes

    names = ("llama-3-8b", "llama-3-70b", "llama-3-405b")
    models = [count(get(name)) for name in names]
    kept = " / ".join(f"{weight_bytes(get(name), ServingLayout('int4-g128z')) / GB:.0f}" for name in names)
    table = {dtype: [stored_bytes(n, dtype) / GB for n in models] for dtype in ("float16", "int8", "int4")}
    memory = (lookup("H200").device.memory_bytes or 0) / GB
    shown = {dtype.replace("float", "fp"): " / ".join(f"{gb:.0f}" for gb in row) for dtype, row in table.items()}
    return {
        "table": table,
        "h200": memory,
        "fits": "fits" if table["int4"][2] < memory else "does not fit",
        "stored": kept,
    } | shown


@shows(
    "tp-13b-40-gpu",
    "quoted.tokens.stored_bytes",
    text="70B is {whole:.0f} GB, {tp4_gb:.1f} GB on each of four; 405B is {405b_gb:.0f} GB, {tp8pp2:.1f} GB on each "
    "of 16",
)
def _split_weights(inputs: Inputs) -> Values:
    small, large = (stored_bytes(count(get(name))) / GB for name in ("llama-3-70b", "llama-3-405b"))
    return {"tp4_gb": small / 4, "405b_gb": large, "whole": small, "tp8pp2": large / 16}


@shows(
    "tp4-free-memory",
    "quoted.tokens.stored_bytes",
    "cluster.catalog.lookup",
    text="{gb:.1f} GB of 80 GB as it is sold, {real_gb:.1f} GB of what CUDA reports of an A100-80GB",
)
def _free_memory(inputs: Inputs) -> Values:
    weights = stored_bytes(count(get("llama-3-70b"))) / 4 / GB
    reported = (lookup("A100").device.memory_bytes or 0) / GB
    return {"gb": 80 - weights, "real_gb": reported - weights}


@shows("tp-inference-2.5mb", TRAFFIC, text="{mib:g} MiB a token")
def _sums_of_a_token(inputs: Inputs) -> Values:
    return {"mib": summed_bytes(get("llama-3-70b")) / 2**20}


@shows(
    "tp-decode-nvlink",
    PRICE,
    "predict.time.Pricing",
    text="{wire_us_nvlink:.3f} us and {wire_us_pcie:.3f} us on the wire; as NCCL was measured {a100:.0f} us on 4 A100 "
    "and {h100:.0f} us on 4 H100: {worst:.0f} and {best:.0f} times more",
)
def _one_token(inputs: Inputs) -> Values:
    nbytes, p = boundary_bytes(1, inputs["hidden"], inputs["bytes"]), inputs["p"]
    wire = {name: 1e6 * ring_sums(nbytes, p, speed) for name, speed in (("nvlink", NVLINK), ("pcie", PCIE))}
    real = {name: 1e6 * measured_seconds(f"{p}x{name}", "all_reduce", nbytes, p) for name in ("a100", "h100")}
    return {
        "wire_us_nvlink": wire["nvlink"],
        "wire_us_pcie": wire["pcie"],
        "worst": real["a100"] / wire["nvlink"],
        "best": real["h100"] / wire["nvlink"],
    } | real


@shows(
    "tp-decode-batch32",
    TRAFFIC,
    PRICE,
    text="{bytes:,} bytes a sum; {wire_ms_nvlink:.2f} ms and {wire_ms_pcie:.2f} ms on the wire, {a100:.1f} ms as NCCL "
    "was measured on 4 A100",
)
def _batch_of_32(inputs: Inputs) -> Values:
    model = get("llama-3-70b")
    item, everything = boundary_bytes(32, model.hidden), summed_bytes(model, 32)
    return {
        "bytes": item,
        "wire_ms_nvlink": 1e3 * ring_sums(everything, 4, NVLINK),
        "wire_ms_pcie": 1e3 * ring_sums(everything, 4, PCIE),
        "a100": 1e3 * everything / item * measured_seconds("4xA100", "all_reduce", item, 4),
    }


@shows(
    "tp-decode-19mb",
    TRAFFIC,
    PRICE,
    text="payload {payload_mib:g} MiB; on the wire {wire_mb_p4:.2f} MB a GPU at p=4, {wire_mb_p8:.2f} MB at p=8",
)
def _traffic_of_a_token(inputs: Inputs) -> Values:
    payload = summed_bytes(get("llama-3-70b"))
    wire = {f"wire_mb_p{p}": ring_sums(payload, p, 1.0) / 1e6 for p in (4, 8)}
    return {"payload_mib": payload / 2**20} | wire


@shows(
    "analyser-output",
    TRAFFIC,
    PRICE,
    "quoted.pipelines.of_total",
    text="{gpu_gb:.1f} GB a GPU; TP {tp_mb:.2f} MB, {tp_ms_nvlink:.4f} and {tp_ms_pcie:.3f} ms on the wire, "
    "{real_ms:.1f} ms as NCCL was measured on 4 A100; bubble {bubble:.1%}",
)
def _analyser(inputs: Inputs) -> Values:
    model, p = get("llama-3-70b"), inputs["p"]
    item, payload = boundary_bytes(inputs["batch"], model.hidden), summed_bytes(model, inputs["batch"])
    return {
        "tp_mb": ring_sums(payload, p, 1.0) / 1e6,
        "tp_ms_nvlink": 1e3 * ring_sums(payload, p, inputs["nvlink_gb_s"] * GB),
        "tp_ms_pcie": 1e3 * ring_sums(payload, p, inputs["pcie_gb_s"] * GB),
        "bubble": of_total(p, 4),
        "gpu_gb": stored_bytes(count(model)) / p / GB,
        "real_ms": 1e3 * payload / item * measured_seconds("4xA100", "all_reduce", item, p),
    }


@shows(
    "zero-inference-16gb",
    "quoted.tokens.received_bytes",
    text="{received_gb_per_gpu:.1f} GB into every GPU, {fabric_gb:.0f} GB in all, for each token",
)
def _gathered_weights(inputs: Inputs) -> Values:
    item = received_bytes(stored_bytes(count(get("llama-3-70b"))), 8) / GB
    return {"received_gb_per_gpu": item, "fabric_gb": 8 * item}


@shows(
    "zero-inference-layer-200mb",
    "quoted.tokens.received_bytes",
    "quoted.tokens.block_bytes",
    text="{resident_shard_mb:.1f} MB stay on a GPU, {received_per_gpu_gb:.2f} GB come from the others",
)
def _gathered_layer(inputs: Inputs) -> Values:
    block = block_bytes(gpt(8192))
    return {"resident_shard_mb": block / 8 / 1e6, "received_per_gpu_gb": received_bytes(block, 8) / GB}


@shows(
    "ratio-6400",
    "planner.strategies.traffic_ratio",
    "planner.strategies.compare",
    "shardwise generate llama-3-70b --compare tp=8 zero=3,dp=8 --cluster 8xH100",
    text="{blocks:,.0f} times for the blocks, {all_parameters:,.0f} for all parameters; a token takes {time:.0f} "
    "times as long on 8 H100 ({gather_ms:.0f} ms against {tensor_ms:.1f} ms)",
)
def _gathering_over_tensor(inputs: Inputs) -> Values:
    from shardwise.planner.strategies import Asked, compare

    model = get("llama-3-70b")
    layouts = [Layout.parse(text) for text in ("tp=8", "zero=3,dp=8")]
    comparison = compare(model, layouts, Cluster.parse("8xH100"), Asked(prompt=1024, output=256))
    tensor, gathering = (one.middle.seconds for one in comparison.strategies)
    return {
        "blocks": traffic_ratio(count_parts(model)[1], model),
        "all_parameters": traffic_ratio(count(model), model),
        "time": comparison.ratios[0].seconds,
        "gather_ms": 1e3 * gathering,
        "tensor_ms": 1e3 * tensor,
    }


@shows("ratio-crossover", "planner.strategies.traffic_ratio", text="{tokens:,.0f} tokens a step")
def _crossover(inputs: Inputs) -> Values:
    model = get("llama-3-70b")
    return {"tokens": traffic_ratio(count_parts(model)[1], model)}


@shows(
    "inference-83-training-5",
    "quoted.tokens.received_bytes",
    "quoted.tokens.read_seconds",
    text="gathering a layer of Llama-3-70B on 8 GPUs takes {said:.1%} of a token's time at 600 GB/s with an H100's "
    "memory, {real:.1%} at 450 GB/s one way; {training:.1%} of a forward pass over 8,192 tokens at an A100's peak",
)
def _share_of_gathering(inputs: Inputs) -> Values:
    model, hopper, ampere = get("llama-3-70b"), lookup("H100"), lookup("A100")
    peak, one_way = ampere.device.peak("bfloat16"), hopper.intra.bandwidth
    assert peak and one_way
    block = block_bytes(model)
    gather, reading = received_bytes(block, 8) / NVLINK, read_seconds(block, hopper.device)
    products = (matmul_parameters(model) - model.vocab * model.hidden) / model.layers
    computing = 2 * 8192 * products / peak
    said, real = gather / (gather + reading), received_bytes(block, 8) / one_way
    return {"said": said, "real": real / (real + reading), "training": gather / (gather + computing)}


@shows(
    "decode-matmul-time",
    "quoted.tokens.read_seconds",
    text="{layer_ms_one_gpu_h100:.2f} ms on one H100, {tp8_ms:.3f} ms on each of eight",
)
def _reading_a_layer(inputs: Inputs) -> Values:
    block, device = block_bytes(get("llama-3-70b")), lookup("H100").device
    return {"layer_ms_one_gpu_h100": 1e3 * read_seconds(block, device), "tp8_ms": 1e3 * read_seconds(block, device, 8)}
