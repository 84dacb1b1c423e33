"""Measured memory of published rows against what the software of the row would hold.

Only Megatron-DeepSpeed's is known (`megatron_memory.deepspeed_bytes`); docs/prediction.md says how far that goes. Rows
that a paper computed are no measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from shardwise.errors import UserError
from shardwise.predict.memory.capacity import RESERVED_BYTES
from shardwise.validation.megatron_memory import deepspeed_bytes
from shardwise.validation.scoreboard.configuration import Row, engine_of, model_of, split_of, stage_of, whole

GIB = 1024**3

REBALANCED = "Rebalancing layers"
"""The section of BLOOM's chronicles from which on tables of the vocabulary count as a layer when stages are cut, and
gradients are summed in fp32 (train/tr11-176B-ml/chronicles-prequel.md says both at its beginning)."""


@dataclass(frozen=True)
class MemoryRow:
    """One published row of measured memory. nbytes, measured: of its fullest device."""

    row: Row
    nbytes: float
    measured: float

    @property
    def error(self) -> float:
        return self.nbytes / self.measured - 1


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
    def bias(self) -> float | None:
        return fmean(one.error for one in self.rows) if self.rows else None


def memory_scores(rows: Sequence[Row]) -> list[MemoryScore]:
    """One score for each source that says how much memory its rows took, in the order in which they appear."""
    request = [row for row in rows if row.get("mem_gib_per_gpu") is not None]
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
    measured = row["mem_gib_per_gpu"]
    if type(measured) not in (int, float) or not 0 < measured < 1e6:
        raise UserError(f"mem_gib_per_gpu must be a positive number, not {measured!r}")
    assumed: list[str] = []
    model = model_of(row, assumed)
    split = split_of(row, model, assumed)
    if not engine_of(row, assumed).startswith("megatron-deepspeed") or split.recompute != "full" or split.zero > 1:
        raise UserError("what its software holds is not known")
    wide = REBALANCED in str(row.get("notes"))
    nbytes = deepspeed_bytes(
        model, _stages(model.layers, split.pp, wide), split.seq, split.micro, split.micro_batches, split.tp,
        whole(row, "dp", split.dp), "wide" if wide else "sharded" if stage_of(row, assumed) else "whole",
    )  # fmt: skip
    return MemoryRow(row, nbytes + RESERVED_BYTES, measured * GIB)


def _stages(layers: int, pp: int, tables: bool) -> list[int]:
    """Layers of each stage, the last with fewer where they do not divide; tables: both ends have one in place of a
    layer, where that divides."""
    if tables and pp > 1 and (layers + 2) % pp == 0 and layers + 2 > pp:
        item = (layers + 2) // pp
        return [item - (stage in (0, pp - 1)) for stage in range(pp)]
    item = -(-layers // pp)
    return [max(0, min(item, layers - item * stage)) for stage in range(pp)]
