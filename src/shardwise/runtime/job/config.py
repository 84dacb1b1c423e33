"""`TrainConfig`: everything that a training run needs, as one JSON file that every rank reads. Imports no torch.

The command line, `api.train`, run.json and the ranks share it; each field says what it means and what its flag is.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.options import check_fields, option
from shardwise.runtime import DEVICES, MOST_THREADS, TRANSPORTS
from shardwise.runtime.job.losses import LossConfig
from shardwise.runtime.job.output import say
from shardwise.runtime.job.slow_ranks import emulate_option, slow_option

if TYPE_CHECKING:
    from shardwise.schedule.stragglers import Stragglers

MOST_SEED = (1 << 64) - 1
"""The largest that a checkpoint's manifest can hold: `checkpoint.manifest.SEEDS`."""
WORKER = (sys.executable, "-m", "shardwise.runtime.job.worker")
"""The command of a rank, before the path of its configuration."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer: linear warm-up, cosine decay to `final_share`, norm clipping, decoupled weight decay.

    `Workload.optimizer` names the optimizer: AdamW (Loshchilov and Hutter 2019), or SGD with or without momentum.
    """

    lr: float = option(
        1e-3, "peak learning rate; momentum and sgd need a larger one", metavar="X", positive=True, shown="1e-3"
    )
    betas: tuple[float, float] = option((0.9, 0.95), "decay of AdamW's averages of gradients and of their squares")
    eps: float = option(1e-8, "added to the root of AdamW's average square", positive=True)
    momentum: float = option(0.9, "decay of momentum's average of gradients", metavar="X", least=0, most=1)
    weight_decay: float = option(0.1, "weight decay of matrices", metavar="X", least=0)
    warmup: int = option(10, "steps of linear warm-up", metavar="N", least=0)
    final_share: float = option(0.1, "learning rate at the end, as a fraction of its peak", least=0, most=1)
    clip: float = option(1.0, "maximum global gradient norm, 0 for none", metavar="X", least=0, shown="1.0")

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas must be at least 0 and less than 1, not {self.betas}")


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of `step` (from 0): linear warm-up over `warmup` steps, then a cosine down to `final_share`."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_share + (1 - config.final_share) * cosine)


@dataclass(frozen=True)
class TrainConfig(Json):
    """One training run."""

    model: ModelConfig
    layout: Layout = option(help="how the model is split, such as dp=2,tp=2,zero=3,sp", metavar="TEXT", shown="dp=1")
    workload: Workload = option(help="sequences of a step and their length")
    data: str = option(help="file, folder, saved dataset, or stdlib (Python's own source)", metavar="SOURCE")
    out: str = option(help="run directory, new or empty", metavar="DIR", shown="runs/MODEL-N")
    corpus: str = ""
    """Folder of the prepared tokens, "" before they are prepared."""
    corpus_fingerprint: str = ""
    """Hash of the prepared tokens."""
    former_corpus: str | None = None
    """The corpus that a resumed run had before it was given other text."""
    steps: int = option(100, "optimizer steps", metavar="N", least=1)
    schedule: str = option(
        "extend",
        "learning rate of a resumed run with other --steps: that of a run of so many steps, or its former schedule, "
        "which ends where it would have",
        choices=("extend", "keep"),
    )  # fmt: skip
    schedule_steps: int = 0
    """Steps of the learning rate's schedule, 0 for `steps`."""
    tokenizer: str | None = option(None, "a tokenizer.json (default: one is trained on the text)", metavar="FILE")
    text_field: str = option("text", "field of the text in JSONL, CSV, Parquet or a dataset", metavar="NAME", shown="")
    max_bytes: int | None = option(None, "use at most the first N bytes of text", metavar="N", least=1)
    loss: str = option(
        "", "sft, dpo[,beta=0.1] or distill,teacher=DIR[,temperature=1]", metavar="TEXT",
        shown="dpo for preference pairs, else sft",
    )  # fmt: skip
    seed: int = option(0, "seed of weights, dropout and the order of the text", metavar="N", least=0, most=MOST_SEED)
    optimizer: OptimizerConfig = option(factory=OptimizerConfig)
    validate_every: int = option(0, "steps between validations", metavar="N", least=0, shown="0: at the end")
    validate_batches: int = option(4, "batches of each validation", metavar="N", least=1)
    report: bool = option(False, "measure one step, to compare it with its prediction")
    save_every: int = option(0, "steps between checkpoints", metavar="N", least=0, shown="0: at the end")
    keep_last: int = option(3, "checkpoints to keep, 0 for all", metavar="N", least=0)
    on_nonfinite: str = option(
        "stop", "end the run, or skip the update, at a step whose loss or gradient norm is not finite",
        choices=("stop", "skip"),
    )  # fmt: skip
    save_async: bool = option(False, "continue training while a checkpoint is written")
    offload_dir: str | None = option(
        None, "folder for state that is offloaded to disk", metavar="DIR", shown="OUT/offload"
    )
    weights: str | None = option(None, "start from a Hugging Face folder's weights, and its tokenizer", metavar="DIR")
    adapters: str | None = None
    """Folder of `peft` adapters to start from, beside the weights."""
    class_plan: dict[str, str] | None = None
    """Plan of tensor parallelism of a model by its class of transformers; None for the one that the class publishes."""
    class_parts: tuple[str, ...] | None = None
    """The order of its parts under a pipeline."""
    resume: str | None = None
    """The checkpoint, or the run, to resume from; of `weights` only frozen ones are then read."""
    restart: int = 0
    """Number of restarts of the run after a failure, in its own directory."""
    tensorboard: bool = option(True, "write no TensorBoard files")
    device: str = option("cpu", "where ranks compute", choices=DEVICES)
    threads: int = option(1, "torch's intra-op threads per rank", metavar="N", least=1, most=MOST_THREADS)
    matmul: str = option(
        "highest", "precision of fp32 matrix products, as in torch", choices=("highest", "high", "medium")
    )
    overlap: bool = option(True, "do not overlap communication with computation (same results)")
    transport: str = option(
        "auto",
        "transport between CPU ranks: shared memory on one host, or gloo; auto prefers shared memory",
        choices=TRANSPORTS,
    )
    slow: tuple[str, ...] = slow_option()
    emulate: str | None = emulate_option()
    hang: float = option(600.0, "end the run after S seconds without progress", metavar="S", positive=True)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slow or self.emulate is not None:
            self._check_slow()
        if self.save_async and self.layout.uses_disk:
            raise UserError(
                "an asynchronous save keeps a copy of all state in memory, which state on disk may be too large for: "
                "leave out --save-async"
            )

    @property
    def minimized(self) -> LossConfig:
        return LossConfig.parse(self.loss)

    def learning_rate(self, step: int) -> float:
        """Learning rate of `step` (from 0) of the run."""
        return learning_rate(self.optimizer, step, self.schedule_steps or self.steps)

    @property
    def stragglers(self) -> Stragglers:
        from shardwise.schedule.stragglers import Stragglers

        return Stragglers.parse(self.slow, self.seed)

    @property
    def emulated(self) -> float | None:
        from shardwise.schedule.stragglers import emulated_seconds

        return emulated_seconds(self.emulate)

    def _check_slow(self) -> None:
        slow, seconds = self.stragglers, self.emulated
        if slow.slow and seconds is None:
            if self.device == "cuda":
                raise UserError("--slow on GPUs needs the time of a step's arithmetic: add --emulate TIME")
            if any(one.spread for one in slow.slow):
                raise UserError("--slow with spread makes some steps faster, too: add --emulate TIME")
        if seconds is not None and seconds * slow.most >= self.hang:
            raise UserError(
                f"a step of {seconds * slow.most:g} s would be taken for a hang: give --hang more than that"
            )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> TrainConfig:
        return cls.from_json(json.loads(path.read_text()))


@dataclass(frozen=True)
class LaunchConfig:
    """Options for starting and restarting the local ranks of a run."""

    port: int = option(0, "rendezvous port", metavar="N", shown="none: a file is used")
    restarts: int = option(
        0, "restart from the last good checkpoint at most N times, if a rank dies or hangs", metavar="N", least=0
    )
    elastic: bool = option(False, "restart without the ranks that were killed, with a smaller dp")
    progress: Callable[[str], None] = say
    """Gets lines about the preparation and restarts."""
    rank0_stdout: int | None = None
    """File descriptor for rank 0's progress."""
    worker: Sequence[str] = WORKER
    """The command of a rank, before the path of its configuration."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.elastic and not self.restarts:
            raise UserError("an elastic run shrinks when it restarts: allow that with --restarts N")
