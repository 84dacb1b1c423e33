"""Measured memory of published rows against what the software of the row would hold.

Megatron-DeepSpeed has a formula of its own (`megatron_memory.deepspeed_bytes`); other software is counted from
`predict/memory/engines.toml`. Rows that a paper computed are no measurements. A row with `use` "read" was used to read
that table; errors are judged by the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.lora import Lora
from shardwise.predict.memory.capacity import RESERVED_BYTES
from shardwise.predict.memory.engine_bytes import WEIGHT, engine_ranks
from shardwise.predict.memory.engine_rows import EngineMemory, engine_memory
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.predict.time.kernels import WIDTH
from shardwise.validation.megatron_memory import deepspeed_bytes
from shardwise.validation.scoreboard.configuration import Row, engine_of, model_of, split_of, stage_of, whole

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


def _under_engine(row: Row, memory: EngineMemory, assumed: list[str]) -> float:
    """Bytes of the rank that reports, by default the fullest, from the engine's rows."""
    model = model_of(row, assumed).replace(tied=bool(row.get("tied")))
    if row.get("lora_rank"):
        model = model.replace(lora=Lora(whole(row, "lora_rank"), targets=tuple(row.get("lora_targets", ()))))
    split = split_of(row, model, assumed)
    layout = Layout(
        dp=split.dp, tp=split.tp, pp=split.pp, cp=split.cp, ep=split.ep, zero=split.zero, sp=split.sp,
        micro=split.micro, recompute=split.recompute, virtual=split.virtual,
        schedule="interleaved" if split.virtual > 1 else "1f1b",
        stages=tuple(map(int, row["stages"].split("/"))) if row.get("stages") else (),
        offload_activations="cpu" if row.get("offload_activations") else "none",
    )  # fmt: skip
    workload = Workload(split.seq, split.micro * split.micro_batches * split.dp)
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
    nbytes = deepspeed_bytes(
        model, _stages(model.layers, split.pp, wide), split.seq, split.micro, split.micro_batches, split.tp,
        whole(row, "dp", split.dp), "wide" if wide else "sharded" if stage_of(row, assumed) else "whole",
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
