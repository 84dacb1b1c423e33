"""Measured memory of published rows against what the software of the row would hold.

Megatron-DeepSpeed has a formula of its own (`deepspeed_bytes`); other software is counted from
`predict/memory/engines.toml`. Rows that a paper computed are no measurements. A row with `use` "read" was used to read
that table; errors are judged by the others.

Memory of a GPT trained by Megatron-LM with unfused attention in fp16, as its authors count it; and by
Megatron-DeepSpeed, whose pipeline and ZeRO stage 1 hold more.

Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models: equations 1 to 6, section 4.2.3
for pipelines. What the decoder here saves is `activations.py`'s; this is for comparing with their tables.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.lora import Lora
from shardwise.predict.memory.capacity import RESERVED_BYTES
from shardwise.predict.memory.engine_bytes import WEIGHT, engine_ranks
from shardwise.predict.memory.engine_rows import EngineMemory, engine_memory
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.predict.time.kernels import WIDTH
from shardwise.validation.scoreboard.configuration import Row, engine_of, model_of, split_of, stage_of, whole

Recompute = Literal["none", "selective", "full"]

BLOCK_ITEMS = {
    "attention": {"input": 2, "queries, keys, values": 6, "projection's input": 2, "dropout mask": 1},
    "mlp": {"input": 2, "activation's input": 8, "second product's input": 8, "dropout mask": 1},
    "layernorm": {"first": 2, "second": 2},
}
"""Bytes that a layer saves beside its attention scores per element of s b h (section 4.1): 34 in all."""

SPLIT_ITEMS = ("queries, keys, values", "projection's input", "activation's input", "second product's input")
"""Those that tensor parallelism splits; sequence parallelism splits the others, too (section 4.2)."""


def block_activations(
    model: ModelConfig, micro: int, seq: int, tp: int = 1, sp: bool = False, recompute: Recompute = "none"
) -> float:
    """Bytes that one layer saves for one micro-batch on one of `tp` ranks."""
    hidden, heads = model.hidden, model.heads
    unit = float(seq * micro * hidden)
    scores = 5 * heads * seq / hidden
    if recompute == "full":
        return 2 * unit / (tp if sp else 1)
    core = 0.0 if recompute == "selective" else scores
    items = [(name, size) for part in BLOCK_ITEMS.values() for name, size in part.items()]
    split = sum(size for name, size in items if sp or name in SPLIT_ITEMS)
    whole = sum(size for _, size in items) - split
    return unit * (whole + split / tp + core / tp)


REDUCE_BUCKET = 5e8
"""Elements of the buffer that gradients are reduced in: DeepSpeed, reduce_bucket_size, its default."""

COMMUNICATOR_BYTES = {1: 0.0, 2: 544 * 2**20}
"""Bytes of an NCCL communicator inside a node of A100 with NVLink, by its ranks, as measured: NVIDIA/nccl issue 964."""
LARGER_COMMUNICATOR_BYTES = 688 * 2**20
"""Bytes of one with more than two ranks, from the same place."""

Optimizer = Literal["whole", "sharded", "wide"]
"""DeepSpeed's: at ZeRO stage 0 in 16 bits (FP16_Optimizer), at stage 1 in 16 bits, and with fp32 sums of all gradients
(BF16_Optimizer)."""


def deepspeed_bytes(
    model: ModelConfig,
    layers: Sequence[int],
    seq: int,
    micro: int,
    micro_batches: int,
    tp: int,
    dp: int,
    optimizer: Optimizer,
) -> float:
    """Bytes of the fuller one of a pipeline's ends, under Megatron-DeepSpeed with every layer recomputed.

    layers: of each stage; a table of the vocabulary is on the first and on the last one. The CUDA context is not in it,
    nor communicators between nodes, whose size is not stated.

    Activations: of each micro-batch in flight the input of every layer, and what the stage was sent and sends
    (DeepSpeed 0.6, runtime/pipe/engine.py). Two communicators span the tp ranks: Megatron-LM's own, and the
    one over which the pipeline's messages are cut (runtime/pipe/topology.py). All buffers are added up: torch's
    allocator gives none back.
    """
    table, block = model.vocab * model.hidden / tp, 12 * model.hidden**2 / tp
    stream = 2.0 * seq * micro * model.hidden
    again = block_activations(model, micro, seq, tp)
    results = []
    for stage in {0, len(layers) - 1}:
        last = stage == len(layers) - 1
        states = _deepspeed_states(layers[stage] * block + table, table, dp, optimizer)
        flying = min(len(layers) - stage, micro_batches) * stream * (layers[stage] + 2)
        # In fp32, in place of which come the softmax and its gradient; and in 16 bits (megatron/mpu/cross_entropy.py).
        logits = seq * micro * model.vocab / tp * (4 + 2) if last else 0.0
        results.append(states + flying + again + logits)
    return max(results) + 2 * COMMUNICATOR_BYTES.get(tp, LARGER_COMMUNICATOR_BYTES)


def _deepspeed_states(weights: float, table: float, dp: int, optimizer: Optimizer) -> float:
    """Bytes of `weights` parameters with all that updates them. table: elements of the largest one.

    Weights and gradients in 16 bits, a master copy and two moments, a bucket of gradients that are reduced. Besides:

    - whole: at the step, all gradients in fp32, one by one, and once more end to end (runtime/fp16/fused_optimizer.py).
    - sharded: at the step, the rank's own gradients end to end in 16 bits and in fp32 (runtime/zero/stage_1_and_2.py).
    - wide: fp32 sums of all gradients, to which each micro-batch's are added as an fp32 copy, one at a time
      (runtime/bf16_optimizer.py, update_hp_grads).

    Where sums are kept in 16 bits, autograd makes each micro-batch's gradient of a parameter before it adds it.
    """
    if optimizer == "wide":
        return 8 * weights + 12 * weights / dp + 4 * table + 4 * REDUCE_BUCKET
    local = weights / dp
    updating = 20 * weights if optimizer == "whole" else 18 * local
    return 4 * weights + updating + 2 * table + 2 * REDUCE_BUCKET


GIB = 1024**3

MEASURED = ("mem_gib_per_gpu", "peak_memory_gib", "peak_memory_gb")
"""Keys of a row's memory, in GiB, which torchtitan's tables call GB."""

REBALANCED = "Rebalancing layers"
"""The section of BLOOM's chronicles from which on tables of the vocabulary count as a layer when stages are cut, and
gradients are summed in fp32 (train/tr11-176B-ml/chronicles-prequel.md says both at its beginning)."""


@dataclass(frozen=True)
class MemoryRow:
    """One published row of measured memory. nbytes, measured: of its fullest device, or of the rank that reports."""

    row: Row
    nbytes: float
    measured: float

    @property
    def error(self) -> float:
        return self.nbytes / self.measured - 1

    @property
    def read(self) -> bool:
        """Whether the table of engines was read from this row, too."""
        return self.row.get("use") == "read"

    def describe(self) -> str:
        """The row, its prediction and its measurement in one line."""
        keys = ("gpus", "dp", "tp", "pp", "cp", "vpp", "mbs", "seq", "precision", "recompute")
        words = ",".join(f"{key}={self.row[key]}" for key in keys if self.row.get(key) not in (None, ""))
        return (
            f"{self.row['source_id']} {self.row['model']} {words}: {self.nbytes / GIB:.1f} GiB, measured "
            f"{self.measured / GIB:.1f} ({100 * self.error:+.1f}%){' (read)' if self.read else ''}"
        )


@dataclass(frozen=True)
class MemoryScore:
    """Errors of one source's measured memory, as shares of it; None where no row is known well enough."""

    source: str
    rows: tuple[MemoryRow, ...]
    skipped: dict[str, int]

    @property
    def mean_abs_error(self) -> float | None:
        return fmean(abs(one.error) for one in self.rows) if self.rows else None

    @property
    def held_out_error(self) -> float | None:
        """Mean error of the rows that the table of engines was not read from; None where there is none."""
        errors = [abs(one.error) for one in self.rows if not one.read]
        return fmean(errors) if errors else None

    @property
    def bias(self) -> float | None:
        return fmean(one.error for one in self.rows) if self.rows else None


def memory_scores(rows: Sequence[Row]) -> list[MemoryScore]:
    """One score for each source that says how much memory its rows took, in the order in which they appear."""
    request = [row for row in rows if any(row.get(key) is not None for key in MEASURED)]
    results: dict[str, tuple[list[MemoryRow], Counter[str]]] = {}
    for row in request:
        held, skipped = results.setdefault(row["source_id"], ([], Counter()))
        try:
            held.append(_held(row))
        except UserError as error:
            skipped[str(error)] += 1
    return [MemoryScore(source, tuple(held), dict(skipped)) for source, (held, skipped) in results.items()]


def _held(row: Row) -> MemoryRow:
    if row.get("memory_is"):
        raise UserError(f"its memory is {row['memory_is']}")
    if row.get("skip"):
        raise UserError(str(row["skip"]))
    key = next(key for key in MEASURED if row.get(key) is not None)
    measured = row[key]
    if type(measured) not in (int, float) or not 0 < measured < 1e6:
        raise UserError(f"{key} must be a positive number, not {measured!r}")
    assumed: list[str] = []
    name = engine_of(row, assumed)
    if name.startswith("megatron-deepspeed"):
        return MemoryRow(row, _under_deepspeed(row, assumed), measured * GIB)
    if (memory := engine_memory(name)) is None or name == "unknown":
        raise UserError("what its software holds is not known")
    return MemoryRow(row, _under_engine(row, memory, assumed), measured * GIB)


_SIZES = ("dp", "tp", "pp", "cp", "ep", "zero", "micro", "virtual")


def _under_engine(row: Row, memory: EngineMemory, assumed: list[str]) -> float:
    """Bytes of the rank that reports, by default the fullest, from the engine's rows."""
    model = model_of(row, assumed).replace(tied=bool(row.get("tied")))
    if row.get("lora_rank"):
        model = model.replace(lora=Lora(whole(row, "lora_rank"), targets=tuple(row.get("lora_targets", ()))))
    split = split_of(row, model, assumed)
    sizes: dict[str, Any] = {name: int(getattr(split, name)) for name in _SIZES}
    layout = Layout(
        **sizes, sp=split.sp, recompute=split.recompute,
        schedule="interleaved" if sizes["virtual"] > 1 else "1f1b",
        stages=tuple(map(int, row["stages"].split("/"))) if row.get("stages") else (),
        offload_activations="cpu" if row.get("offload_activations") else "none",
    )  # fmt: skip
    workload = Workload(split.seq, int(split.micro * split.micro_batches * split.dp))
    at = {"first rank": [0], "last rank": [layout.pp - 1]}.get(str(row.get("reported")), list(range(layout.pp)))
    modules = tuple(str(row.get("recompute_modules") or "").split())
    settings = EngineSettings("fp8" if WIDTH[split.dtype] < WEIGHT else "", modules)
    plan = unit_plan(model, layout, workload, backend="nccl")
    return max(float(rank.peak) for rank in engine_ranks(memory, plan, at, settings))


def _under_deepspeed(row: Row, assumed: list[str]) -> float:
    """Bytes of the fullest device under Megatron-DeepSpeed, with what the driver's context takes."""
    model = model_of(row, assumed)
    split = split_of(row, model, assumed)
    if split.recompute != "full" or split.zero > 1:
        raise UserError("what its software holds is not known")
    wide = REBALANCED in str(row.get("notes"))
    pp, micro, count, tp, dp = (int(n) for n in (split.pp, split.micro, split.micro_batches, split.tp, split.dp))
    nbytes = deepspeed_bytes(
        model, _stages(model.layers, pp, wide), split.seq, micro, count, tp,
        whole(row, "dp", dp), "wide" if wide else "sharded" if stage_of(row, assumed) else "whole",
    )  # fmt: skip
    return nbytes + RESERVED_BYTES


def _stages(layers: int, pp: int, tables: bool) -> list[int]:
    """Layers of each stage, the last with fewer where they do not divide; tables: both ends have one in place of a
    layer, where that divides."""
    if tables and pp > 1 and (layers + 2) % pp == 0 and layers + 2 > pp:
        item = (layers + 2) // pp
        return [item - (stage in (0, pp - 1)) for stage in range(pp)]
    item = -(-layers // pp)
    return [max(0, min(item, layers - item * stage)) for stage in range(pp)]
