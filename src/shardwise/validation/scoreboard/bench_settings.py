"""Settings that trtllm-bench chooses for a run of its own: the most sequences and tokens of a pass, and its graphs.

NVIDIA/TensorRT-LLM 1.0 and 1.2: tensorrt_llm/bench/build/tuning.py (`calc_engine_setting`, `finetune_setting`),
bench/benchmark/utils/general.py (without chunks, a pass has room for the longest prompt and a token of every sequence)
and _torch/pyexecutor/model_engine.py (`_filter_cuda_graph_batch_sizes`: padded up to the most sequences).
"""

from math import ceil, inf
from typing import Any

from shardwise.cluster import Device
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.predict.time.kernels import WIDTH
from shardwise.predict.time.profiles import engine
from shardwise.predict.time.serving import ServingLayout

GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Sizes of graphs of published runs: perf-overview.md, llm_options.yml, cuda_graph_config with enable_padding."""
BYTES = {"fp8": 1.0, "fp8-block128x128": 1.0, "nvfp4": 0.5}
"""Bytes of a weight as its estimate counts them, without scales; others 2."""
SEQUENCES = ((256, 32, 64), (1024, 128, 0), (inf, 256, 0))
"""Sequences of a pass below a limit are rounded up to a multiple, and are no fewer than so many."""
TOKENS = ((4096, 256, 2048), (8192, 512, 0), (inf, 1024, 0))
"""The same for tokens."""


def bench_settings(
    model: ModelConfig, serving: ServingLayout, tp: int, prompt: int, output: int, device: Device
) -> dict[str, Any]:
    """Fields of the engine's profile in a run of the benchmark. tp: as it is given, of attention-dp its ranks."""
    stages, share = int(serving.pp), engine("tensorrt-llm").cache_share
    token = 2 * model.layers * max(tp, model.kv_heads) * model.head_dim * WIDTH[serving.cache]
    free = (device.memory_bytes or 0) * tp * stages - count(model) * BYTES.get(serving.weights, 2.0)
    sequences = min(free * share / (token * (prompt + output)), 4096) / stages
    most = _rounded(sequences, SEQUENCES)
    tokens = max(_rounded(min(sequences * (1 + prompt / output), 32768), TOKENS), prompt + most)
    graphs = tuple(size for size in GRAPHS if size < most)
    # A group of sequences for each stage; a graph computes one.
    return {"most_sequences": most * stages, "most_tokens": tokens, "graph_sizes": (*graphs, most)}


def _rounded(value: float, steps: tuple[tuple[float, int, int], ...]) -> int:
    multiple, least = next((multiple, least) for limit, multiple, least in steps if value < limit)
    return max(least, multiple * ceil(value / multiple))
