"""Rows of published measurements: read, counted once, and turned into questions that the time model answers.

A row is a JSON object; `docs/prediction.md` lists its keys, `configuration.py` understands them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.cluster import Cluster, Device
from shardwise.errors import UserError, os_errors
from shardwise.model import ModelConfig
from shardwise.model.formats import weight_format
from shardwise.model.parameters import count
from shardwise.predict.time.constants import constants
from shardwise.predict.time.kernels import WIDTH
from shardwise.predict.time.profiles import EngineProfile, engine
from shardwise.predict.time.serving import ServingLayout
from shardwise.predict.time.step import StepShape
from shardwise.validation.scoreboard.configuration import (
    ENGINES,
    Row,
    engine_of,
    laid_out,
    model_of,
    recipe_of,
    split_of,
    step_seconds_of,
    weights_of,
    whole,
)
from shardwise.validation.scoreboard.hardware import cluster_of

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
    """Fields of the engine's profile as trtllm-bench chooses them for a run of its own: the most sequences and tokens
    of a pass, and its graphs. tp: as it is given, of attention-dp its ranks.

    NVIDIA/TensorRT-LLM 1.0 and 1.2: tensorrt_llm/bench/build/tuning.py (`calc_engine_setting`, `finetune_setting`),
    bench/benchmark/utils/general.py (without chunks, a pass has room for the longest prompt and a token of every
    sequence) and _torch/pyexecutor/model_engine.py (`_filter_cuda_graph_batch_sizes`: padded up to the most sequences).
    """
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


REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000, (1024, 1024): 3000,
    (8192, 1024): 1500, (1024, 8192): 1500, (32768, 1024): 1000, (1024, 32768): 1000,
}  # fmt: skip
"""(prompt, output) -> requests of one benchmark: NVIDIA/TensorRT-LLM 1.0 and 1.2, perf-overview.md, the tables under
"Preparing a Dataset"."""


SERVERS = {
    "gpt-fast": "gpt-fast", "vllm": "vllm", "tensorrt": "tensorrt-llm", "trtllm": "tensorrt-llm",
    "nvidia nim": "tensorrt-llm", "nvidia.com/nim": "tensorrt-llm", "sglang": "vllm",
}  # fmt: skip
"""Word of a serving row, in lower case -> the profile of its software; NIM's optimized engines are TensorRT-LLM's
(docs.nvidia.com/nim/large-language-models, optimization)."""


@dataclass(frozen=True)
class PublishedCase:
    """One published row as a question to the time model. measured: seconds of a step, or output tokens/s of the whole
    deployment."""

    row: Row
    source: str
    kind: str
    model: ModelConfig
    cluster: Cluster
    engine: str
    precision: str
    measured: float
    split: StepShape | None = None
    serving: ServingLayout | None = None
    prompt: int = 0
    output: int = 0
    requests: int = 0
    clients: int = 0
    """Requests at a time, each of which is followed by the next one when it is answered; 0 where all wait from the
    start."""
    replicas: int = 1
    """Of the served layout, among which requests are shared out."""
    assumed: tuple[str, ...] = field(default=())
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the engine's profile that differ in this run."""

    @property
    def software(self) -> EngineProfile:
        return replace(engine(self.engine), **self.recipe)

    def describe(self) -> str:
        head = f"{self.model.name} ({self.model.layers} x {self.model.hidden}), {self.cluster}, {self.precision}"
        if self.split:
            s = self.split
            degrees = {"tp": s.tp, "pp": s.pp, "dp": s.dp, "cp": s.cp, "ep": s.ep, "virtual": s.virtual, "zero": s.zero}
            words = [f"{key}={value}" for key, value in degrees.items() if value not in (0, 1)]
            words += [f"micro={s.micro} x {s.micro_batches}", f"seq={s.seq}", f"recompute={s.recompute}"]
            return f"{head}, {','.join(words)}"
        assert self.serving
        return f"{head}, tp={self.serving.tp},pp={self.serving.pp}, {self.prompt} tokens in, {self.output} out"


@dataclass(frozen=True)
class Skipped:
    """A row that is not scored, and why."""

    row: Row
    source: str
    reason: str


def read(path: Path) -> list[Row]:
    """The rows of a table. Raises `UserError` for a file that is not a JSON list of objects with a `source_id`."""
    with os_errors(f"read {path}", typed=path, damaged=f"{path} is not JSON:"):
        rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} must be a JSON list of objects, one a measurement")
    for number, row in enumerate(rows):
        if not isinstance(row.get("source_id"), str):
            raise UserError(f"{path}: row {number} has no source_id")
    return rows


def cases(rows: Sequence[Row]) -> tuple[list[PublishedCase], list[Skipped]]:
    """Every row as a case, or the reason why it is none. Measurements of the same configuration by the same source
    count once, as their median."""
    made: list[PublishedCase] = []
    skipped: list[Skipped] = []
    for row in rows:
        try:
            found = cases_of(row)
        except UserError as error:
            skipped.append(Skipped(row, row["source_id"], str(error)))
            continue
        if (device := found[0].cluster.device) and row["source_id"] in constants(device).fitted_on:
            skipped.append(Skipped(row, row["source_id"], f"rates of {device.name} are fitted on it"))
        else:
            made += found
    merged: dict[tuple[Any, ...], list[PublishedCase]] = {}
    for one in made:
        merged.setdefault(_identity(one), []).append(one)
    for same in merged.values():
        skipped += [Skipped(one.row, one.source, "duplicate of the same configuration") for one in same[1:]]
    return [replace(same[0], measured=median(one.measured for one in same)) for same in merged.values()], skipped


def _identity(case: PublishedCase) -> tuple[Any, ...]:
    row = case.row
    keys = (
        "phase", "isl", "osl", "tp", "pp", "gpus", "gbs", "schedule", "techniques", "fsdp", "compile", "batch",
        "concurrency", "ep", "attention_dp",
    )  # fmt: skip
    layout = [repr(row.get(key)) for key in keys]
    run = (case.source, repr(case.model), case.precision, repr(case.split), repr(case.cluster))
    return (*run, case.kind, case.engine, repr(case.recipe), *layout)


def cases_of(row: Row) -> list[PublishedCase]:
    """The questions of one row: one for each of its measurements. Raises `UserError` with the reason where it cannot be
    scored."""
    assumed: list[str] = []
    model = model_of(row, assumed)
    cluster = cluster_of(row, assumed)
    if row.get("phase") == "train":
        return [_training(row, model, cluster, assumed)]
    return _serving(row, model, cluster, assumed)


def _positive(measured: Any, what: str) -> float:
    if type(measured) not in (int, float) or not 0 < measured < float("inf"):
        raise UserError(f"no measured {what}")
    return float(measured)


TIMES = {"ttft_ms": "first token", "itl_ms": "each token", "latency_ms": "answer"}
"""Key of a row -> the question that it answers: means over requests, in milliseconds."""


def _serving(row: Row, model: ModelConfig, cluster: Cluster, assumed: list[str]) -> list[PublishedCase]:
    """One case for each time of a request, and one for the tokens/s."""
    prompt, output = whole(row, "isl", 0), whole(row, "osl", 0)
    clients = whole(row, "concurrency", 0) or whole(row, "batch", 0)
    decode = row.get("phase") == "decode"
    if not decode and not (prompt and output):
        raise UserError("no prompt and output lengths")
    requests = REQUESTS.get((prompt, output), 1500)
    if not decode and not clients and (prompt, output) not in REQUESTS:
        assumed.append(f"number of requests not known: {requests}")
    name = _server(row, assumed)
    # The tokens that gpt-fast makes after the prompt: generate.py, --max_new_tokens 200.
    output = output or 200
    replicas, served = _served_layout(row, model, name, decode)
    benched = not decode and not clients and name == "tensorrt-llm"
    recipe = bench_settings(model, served, whole(row, "tp"), prompt, output, cluster.device) if benched else {}
    measured = {kind: row[key] for key, kind in TIMES.items() if clients and row.get(key) is not None}
    seconds = {kind: _positive(value, kind) / 1e3 for kind, value in measured.items()}
    if row.get("tokens_per_s_total") is not None or not seconds:
        kind = "decode" if decode else "rate" if clients else "throughput"
        seconds[kind] = _positive(row.get("tokens_per_s_total"), "tokens/s")
    return [
        PublishedCase(
            row, row["source_id"], kind, model, cluster, name, str(row.get("precision")), value,
            serving=served, prompt=prompt, output=output, requests=requests, clients=clients, replicas=replicas,
            assumed=tuple(assumed), recipe=recipe,
        )
        for kind, value in seconds.items()
    ]  # fmt: skip


def _served_layout(row: Row, model: ModelConfig, name: str, decode: bool) -> tuple[int, ServingLayout]:
    """Replicas, and the split of one. attention_dp: each of the tp ranks has sequences of its own, and their share of
    the experts, by width where ep does not name all ranks."""
    tp, pp, ep = whole(row, "tp"), whole(row, "pp", 1), whole(row, "ep", 1) if model.experts else 1
    weights = weights_of(row, model)
    narrow = engine(name).narrow_cache and not decode and weight_format(weights).each <= 1
    cache = "float8_e4m3fn" if narrow else "bfloat16"
    apart = max(1, tp // ep) if model.experts else 0
    if row.get("attention_dp"):
        return tp, ServingLayout(weights, cache, 1, pp, ep=ep, etp=apart)
    dp = max(1, whole(row, "gpus", tp * pp) // (tp * pp))
    return dp, ServingLayout(weights, cache, tp, pp, ep=ep, etp=apart)


def _server(row: Row, assumed: list[str]) -> str:
    words = f"{row.get('source')} {row.get('notes')}".lower()
    name = next((name for word, name in SERVERS.items() if word in words), None)
    if name is None:
        assumed.append("software not named: as TensorRT-LLM")
    elif name not in words and "sglang" in words:
        assumed.append("SGLang: as vLLM")
    return name or "tensorrt-llm"


def _training(row: Row, model: ModelConfig, cluster: Cluster, assumed: list[str]) -> PublishedCase:
    seconds = step_seconds_of(row, model)
    name = engine_of(row, assumed)
    recipe: Mapping[str, Any] = {}
    row = laid_out(row, model, cluster, name, assumed)
    split = split_of(row, model, assumed)
    if name.startswith("torchtitan") and "async" in str(row.get("techniques", "")).lower():
        recipe = {"tensor_pipelined": True}
    if model.experts and name == ENGINES["tokens"]:
        found = recipe_of(row, cluster.device.name, WIDTH[split.dtype] < 2)
        if found:
            name, recipe = found
        else:
            assumed.append(f"exchange of tokens not stated: as {name} does it")
    precision = str(row.get("precision"))
    return PublishedCase(
        row, row["source_id"], "train", model, cluster, name, precision, seconds, split, assumed=tuple(assumed),
        recipe=recipe,
    )  # fmt: skip
