"""The scoreboard: published measurements as questions, predicted, and held against what was measured."""

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.planner.common import PUBLISHED_CHOICES
    from shardwise.validation.scoreboard.blocks import BlockScore, block_scores, read_blocks
    from shardwise.validation.scoreboard.left_out import LARGE, LeftOutScore, left_out_scores, weighted_coverage
    from shardwise.validation.scoreboard.memory import MemoryRow, MemoryScore, memory_scores
    from shardwise.validation.scoreboard.mixtures import MixtureScore, mixture_scores
    from shardwise.validation.scoreboard.rows import cases, read
    from shardwise.validation.scoreboard.score import MISS, Prediction, Score, predict, reason, scores

PUBLISHED = Path(__file__).parent / "published.json"
"""The project's own small table: a few rows of every source, each with its citation."""

MEMORY = Path(__file__).parent / "published_memory.json"
"""Peak memory of published runs by engine; `use` says which rows the table of engines was read from."""

RUNS = Path(__file__).parent / "published_runs.json"
"""Steps of large published runs, which no constant is fitted on: docs/published_runs.md."""

SCALING = Path(__file__).parent / "published_scaling.json"
"""The same model and software on more and more devices, which no constant is fitted on."""

__all__ = [
    "LARGE", "MEMORY", "MISS", "PUBLISHED", "PUBLISHED_CHOICES", "RUNS", "SCALING", "BlockScore", "LeftOutScore",
    "MemoryRow", "MemoryScore", "MixtureScore", "Prediction", "Score", "block_scores", "cases", "left_out_scores",
    "memory_scores", "mixture_scores", "predict", "read", "read_blocks", "reason", "scores", "weighted_coverage",
]  # fmt: skip

lazily(__name__)
