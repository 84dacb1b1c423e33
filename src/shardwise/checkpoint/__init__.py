"""State on disk that knows no layout: safetensors files and a manifest of global names, boxes and intervals.

A run saves under one layout and goes on under any other. `writes` and `needs` say what a rank holds, `write_part` and
`commit` put it on the disk, `Checkpoint.read` gets any piece of it back.
"""

from shardwise.checkpoint.file_io import DamagedError
from shardwise.checkpoint.folder import (
    find,
    keep_last,
    kept,
    latest,
    remove_unfinished,
    set_aside,
    unfinished,
    with_older,
)
from shardwise.checkpoint.geometry import Piece
from shardwise.checkpoint.manifest import Manifest, PartRecord, TensorSpec
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import (
    LocalInterval,
    TensorDifference,
    diff,
    model_of,
    needs,
    reshard,
    shapes,
    writes,
)
from shardwise.checkpoint.writer import PartEntry, PartImage, PartWriter, commit, write_part

__all__ = [
    "Checkpoint", "DamagedError", "LocalInterval", "Manifest", "PartEntry", "PartImage", "PartRecord", "PartWriter",
    "Piece", "TensorDifference", "TensorSpec", "commit", "diff", "find", "keep_last", "kept", "latest", "model_of",
    "needs", "remove_unfinished", "reshard", "set_aside", "shapes", "unfinished", "with_older", "write_part", "writes",
]  # fmt: skip
