"""`ServingJob`: everything that the ranks of a generation engine need, as one JSON file that each of them reads.

Also what a folder of weights is (`weights_in`), and what the ranks say beside answers: how far loading is, and that
they are ready. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.codec import Json
from shardwise.errors import LayoutError, UserError, near_path
from shardwise.layout import Layout
from shardwise.layout.context import CHUNK, PAGE, PageCut
from shardwise.layout.serving import check_generation, plan_of
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.options import check_fields, option
from shardwise.runtime import DEVICES, MOST_THREADS, TRANSPORTS

if TYPE_CHECKING:
    import numpy as np

    from shardwise.checkpoint import Checkpoint, Piece
    from shardwise.predict.memory.serving import ServingSetup

CONTEXT = 4096
"""Longest sequence where nobody asked for another, and the model knows so many positions."""
BATCH = 8

LONGEST_HANG = 1e9
"""Seconds that ranks can wait for each other."""


@dataclass(frozen=True)
class ServingJob(Json):
    """One generation engine.

    Raises `UserError` for values that no engine can have, and `LayoutError` for layouts that generation cannot
    run.
    """

    model: ModelConfig
    layout: Layout
    weights: str
    """A Hugging Face folder, a checkpoint or a run directory."""
    context: int = option(
        0, "tokens of the longest sequence", metavar="N", least=0, shown=f"the model's, at most {CONTEXT:,}"
    )
    page: int = option(PAGE, "tokens per page of the cache", least=1)
    pages: int = option(0, "pages of a replica's cache; 0 for as many as batch and context fill", least=0)
    chunk: int = option(CHUNK, "tokens of prompts in an engine step", metavar="N", least=1)
    batch: int = option(BATCH, "sequences at a time on each replica", metavar="N", least=1)
    reuse: bool = option(True, "compute equal beginnings of prompts again")
    prompts: str = option(
        "own", "under zero=3: all ranks compute all prompts", choices=("own", "same"), flag="--same", const="same"
    )
    quantize: str = option("none", "keep matrices in 8 bits", choices=("none", "int8"), flag="--int8", const="int8")
    transport: str = option("auto", "what carries collectives between CPU ranks", choices=TRANSPORTS)
    threads: int = option(1, "torch's intra-op threads per rank", metavar="N", least=1, most=MOST_THREADS)
    device: str = option("cpu", "where ranks compute", choices=DEVICES)
    hang: float = option(
        60.0, "seconds without progress after which to give up", metavar="S", positive=True, most=LONGEST_HANG
    )
    report: str | None = None
    """Folder for the ranks' notes, the source of a `StepReport` for every engine step."""
    class_plan: dict[str, str] | None = None
    """Plan of tensor parallelism of a model by its class of transformers; None for the one that the class publishes."""
    class_parts: tuple[str, ...] | None = None
    """The order of its parts under a pipeline; None for the one that the class publishes."""
    emulate: float = 0.0
    """Seconds that a stage waits in every engine step in place of its arithmetic; 0 computes."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_generation(self.layout, self.model)
        PageCut(self.page, self.layout.cp)
        if self.prompts == "same" and self.layout.stage < 3:
            raise LayoutError("the same prompts on all data ranks are for zero=3: leave `same` out")
        if self.layout.shard and self.prompts == "same":
            raise LayoutError("all data ranks with the same prompts are one group: leave shard out, or prompts=own")
        if self.quantize != "none" and self.layout.stage == 3:
            raise UserError("int8 weights are not gathered: use zero=0 with int8, or leave int8 out")
        if self.quantize != "none" and self.layout.precision == "fp64":
            raise UserError("int8 weights are multiplied with in bf16 or fp32: choose another precision")
        most = self.model.max_positions
        if not self.context:
            held = self.pages * self.page or CONTEXT
            object.__setattr__(self, "context", min(most, held, CONTEXT if not self.pages else most))
        if self.context > most:
            raise UserError(f"{self.model.name} knows {most} positions: a context of {self.context} is too long")
        if not self.pages:
            object.__setattr__(self, "pages", self.batch * -(-self.context // self.page))
        if self.context > self.pages * self.page:
            raise UserError(
                f"a context of {self.context} tokens does not fit a cache of {self.pages} pages of {self.page}; the "
                f"largest that does: {min(most, self.pages * self.page)}"
            )

    @property
    def replicas(self) -> int:
        return 1 if self.layout.stage == 3 and self.prompts == "same" else self.layout.dp

    @property
    def whole_prompts(self) -> bool:
        """Whether each prompt is one forward pass by itself: of a model by its class of transformers, whose linear
        attention takes a state for single tokens alone."""
        return self.model.counted is not None

    @property
    def setup(self) -> ServingSetup:
        from shardwise.predict.memory.serving import ServingSetup

        weights, cpu = "int8" if self.quantize == "int8" else "", self.device == "cpu"
        chunk = self.context if self.whole_prompts else self.chunk
        return ServingSetup(self.context, self.batch, self.page, chunk, cpu, self.pages, weights)

    @property
    def logit_rows(self) -> int:
        """Rows of logits in an engine step that there is room for."""
        from shardwise.predict.memory.serving import logit_rows

        return logit_rows(plan_of(self.model, self.layout, self.layout.pp - 1), self.setup)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> ServingJob:
        return cls.from_json(json.loads(path.read_text()))


class Weights(Protocol):
    """Source of weights: stored names are `model/<parameter>`."""

    def read(
        self, tensor: str, piece: Piece | None = None, dtype: str | None = None, out: np.ndarray | None = None
    ) -> np.ndarray: ...


def weights_in(folder: Path | str) -> tuple[ModelConfig, Weights | None]:
    """The model in a folder, and its weights: a Hugging Face folder, a checkpoint, or a run for its newest one; None
    for the weights of a class of transformers in a Hugging Face folder, which the class reads itself.

    What training drops at random, generation keeps: the model has no dropout. Only headers are read.
    Raises `UserError` when there are none, or they are not whole.
    """
    from shardwise.checkpoint import find, model_of
    from shardwise.checkpoint.huggingface import HuggingFaceWeights

    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"no such folder: {folder}{near_path(folder, folder=True) or '; give a folder of weights or a run'}"
        )
    if (folder / "config.json").exists():
        if (described := resolve(str(folder))).counted:
            if not any(folder.glob("*.safetensors")):
                raise UserError(f"{folder} has no *.safetensors: its class's save_pretrained writes them")
            return described, None
        weights = HuggingFaceWeights.open(folder)
        return _without_dropout(weights.model), weights
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} has adapters alone: `checkpoint merge` of their run adds them to their weights")
    checkpoint: Checkpoint = find(folder)
    model = model_of(checkpoint)
    if model.lora:
        raise UserError(
            f"{checkpoint.folder} has adapters alone: merge them first (checkpoint merge {folder} --out FOLDER)"
        )
    return _without_dropout(model), checkpoint


def _without_dropout(model: ModelConfig) -> ModelConfig:
    return model.replace(dropout=0.0, attention_dropout=0.0)


def tokenizer_of(folder: Path | str) -> Path | None:
    """The tokenizer.json that belongs to a folder's weights: its own, or that of the text a run was trained on."""
    from shardwise.checkpoint import find
    from shardwise.checkpoint.huggingface.companions import companions_of

    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    if (folder / "config.json").exists():
        return None
    checkpoint = find(folder)
    if (kept := companions_of(checkpoint)) is not None:
        return kept / "tokenizer.json"
    about: Mapping[str, Any] = checkpoint.manifest.about
    for name in ("tokenizer", "corpus"):
        if isinstance(value := about.get(name), str):
            path = Path(value)
            file = path / "tokenizer.json" if path.is_dir() else path
            if file.is_file():
                return file
    return None


@dataclass(frozen=True)
class Loading:
    """A replica is reading its weights: so many bytes of so many, on its slowest rank seen so far."""

    replica: int
    done: int
    of: int


@dataclass(frozen=True)
class Ready:
    """A replica answers from now on. parameter_bytes, cache_bytes: of its first rank. transport: what carries its
    collectives. seconds: that loading took. page_tokens: of a page. hop: seconds of a message between stages, measured
    where arithmetic is emulated."""

    replica: int
    context: int
    pages: int
    page_tokens: int
    parameter_bytes: int
    cache_bytes: int
    transport: str
    seconds: float
    hop: float = 0.0
