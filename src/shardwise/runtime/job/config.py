"""`TrainConfig`: everything that a training run needs, as one JSON file that every rank reads. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.runtime import TRANSPORTS

MOST_THREADS = 1024
"""Of a rank: a host of today has fewer cores, and not many times as many can be started."""

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None"}


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise `UserError` unless `value` is of `kind`: a class, a union of some, or a tuple of so many."""
    if not _is(value, kind):
        raise UserError(f"{name} must be {_in_words(kind)}, not {value!r}")


def _is(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is, value, kinds))
    if kind in (int, float):
        # True and False are no numbers here, though Python has them so.
        return not isinstance(value, bool) and isinstance(value, (int, kind))
    return isinstance(value, kind)


def _in_words(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"({', '.join(map(_in_words, get_args(kind)))})"
    return _WORDS.get(kind, f"of type {kind.__name__}")


def _check_fields(config: Any) -> None:
    """Raise `UserError` for a field of another type than it is declared with: a rank would only die of it."""
    for name, kind in get_type_hints(type(config)).items():
        check_type(name, getattr(config, name), kind)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) with linear warm-up, cosine decay to `final_share`, and norm clipping.

    clip=0 switches clipping off. weight_decay touches matrices only.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 10
    final_share: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    data: a source (file, folder, JSONL, Parquet, saved dataset, or "stdlib"). max_bytes: UTF-8 bytes after which its
    text is cut. tokenizer: a `tokenizer.json`, or None to train a byte-level BPE of the model's vocabulary on the data.
    corpus: folder of the prepared tokens, "" before they are prepared. corpus_fingerprint: identifies them.
    former_corpus: the corpus that a resumed run had before it was given other text. out: the run directory.
    validate_every: steps between validations (0: only at the end), each over `validate_batches` global batches.
    report: measure one steady step and write its StepReport. save_every: steps between checkpoints (0: only at the
    end); the newest `keep_last` are kept (0: all). save_async: training continues while one is written.
    weights: a Hugging Face folder to start from. resume: the checkpoint, or the run, to resume from; `weights` then
    counts no more. restart: how many times the run has been started again after a failure, in its own directory.
    overlap: communicate while computing; off gives the same bits. transport: what carries collectives between CPU
    ranks: shared (memory, on one host), gloo, or auto, which prefers the first.
    matmul: torch's float32 matrix-product precision.
    hang: seconds without progress, in a collective or outside, after which a rank counts as stuck and the run ends.
    """

    model: ModelConfig
    layout: Layout
    workload: Workload
    data: str
    out: str
    corpus: str
    corpus_fingerprint: str = ""
    former_corpus: str | None = None
    steps: int = 100
    tokenizer: str | None = None
    text_field: str = "text"
    max_bytes: int | None = None
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    validate_every: int = 0
    validate_batches: int = 4
    report: bool = False
    save_every: int = 0
    keep_last: int = 3
    save_async: bool = False
    weights: str | None = None
    resume: str | None = None
    restart: int = 0
    tensorboard: bool = True
    device: str = "cpu"
    threads: int = 1
    matmul: str = "highest"
    overlap: bool = True
    transport: str = "auto"
    hang: float = 600.0

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.steps < 1:
            raise UserError(f"steps must be a positive integer, not {self.steps}")
        if self.device not in ("cpu", "cuda"):
            raise UserError(f"device must be cpu or cuda, not {self.device!r}")
        if self.transport not in TRANSPORTS:
            raise UserError(f"transport must be one of {', '.join(TRANSPORTS)}, not {self.transport!r}")
        if self.matmul not in ("highest", "high", "medium"):
            raise UserError(f"matmul must be highest, high or medium, not {self.matmul!r}")

    def to_json(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data.update(
            model=self.model.to_json(),
            layout=str(self.layout),
            workload=self.workload.to_json(),
            optimizer=asdict(self.optimizer),
        )
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainConfig:
        data = dict(data)
        optimizer = dict(data.pop("optimizer", {}))
        if "betas" in optimizer:
            optimizer["betas"] = tuple(optimizer["betas"])
        return cls(
            model=ModelConfig.from_json(data.pop("model")),
            layout=Layout.parse(data.pop("layout")),
            workload=Workload(**data.pop("workload")),
            optimizer=OptimizerConfig(**optimizer),
            **data,
        )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> TrainConfig:
        return cls.from_json(json.loads(path.read_text()))
