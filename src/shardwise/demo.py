"""The tour: a large model predicted, a small one trained on four processes, both reports compared, one page.

What the tour is made of; `cli/demo.py` shows it in order. It trains on Python's own library, which is everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from shardwise.api import RUNS, TrainResult, check_unused, resume, train
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.predict.memory.capacity import capacity_of
from shardwise.report import Bytes, ReportComparison, compare
from shardwise.report.run_directory import next_free
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.studio.page import write_export

LARGE = "llama-3-70b"
LARGE_SEQ = 8192
CLUSTERS = ("8xH100", "8x8xH100")

SMALL = "tiny-llama"
# All sequences of a rank go through in one micro-batch: with four processes on two cores, every collective waits for
# its slowest rank, so a step costs little more with many tokens than with few. fp32, since many CPUs have no bf16.
LAYOUT = "dp=2,tp=2,zero=3,sp,micro=8,precision=fp32"
WORKLOAD = Workload(seq=128, batch=16)
STEPS = 80
VALIDATE_EVERY = 40
OPTIMIZER = OptimizerConfig(lr=5e-3)
TEXT_BYTES = 1_500_000

ELSEWHERE = "tp=2,micro=8,precision=fp32"
"""Layout under which the run resumes from its checkpoint."""
MORE_STEPS = 5
SAME_LOSS = 1e-3
"""Nats a token: a checkpoint that was read rightly gives the same validation loss, but for rounding."""


def zero_memory() -> dict[int, dict[int, Bytes]]:
    """ZeRO stage -> number of GPUs -> bytes on each GPU, for `LARGE` with one sequence a GPU and full recompute."""
    table: dict[int, dict[int, Bytes]] = {}
    for stage in range(4):
        for text in CLUSTERS:
            cluster = Cluster.parse(text)
            gpus = cluster.devices
            report = estimate(
                get(LARGE),
                Layout(dp=gpus, zero=stage, recompute="full"),
                Workload(seq=LARGE_SEQ, batch=gpus),
                cluster,
            )
            table.setdefault(stage, {})[gpus] = report.roles[0].bytes
    return table


def capacity() -> int | None:
    """Bytes that training can use of one GPU of `CLUSTERS`."""
    return capacity_of(Cluster.parse(CLUSTERS[0]))


def large_title() -> str:
    """Assumptions of `zero_memory`."""
    return f"{LARGE}, a sequence of {LARGE_SEQ:,} tokens on each GPU, bf16, recompute=full"


def run_directory(out: Path | None) -> Path:
    """Folder of the tour: `out`, or the next free runs/demo-N. Raises `UserError` when something is there."""
    out = out or next_free(RUNS / "demo")
    check_unused(out)
    return out


@dataclass(frozen=True)
class ResumedRun:
    """The run, resumed from its checkpoint under another layout. Losses in nats a token, of the validation text."""

    layout: str
    before: float
    resumed: float
    after: float
    steps: int

    @property
    def failures(self) -> list[str]:
        if abs(self.resumed - self.before) < SAME_LOSS:
            return []
        return [f"the checkpoint has validation loss {self.before:.4f}, but {self.resumed:.4f} under {self.layout}"]


@dataclass(frozen=True)
class Tour:
    """A finished training run with its prediction beside it."""

    result: TrainResult
    comparison: ReportComparison

    def resume_under(self, layout: str, rank0_stdout: int, progress: Callable[[str], None]) -> ResumedRun:
        """Resume the checkpoint under another layout, in a run of its own beside. Arguments as of `learn`. Raises what
        `resume` raises."""
        out = next_free(self.result.out.with_name(f"{self.result.out.name}-resumed"))
        steps = STEPS + MORE_STEPS
        again = resume(
            self.result.out, out=out, layout=layout, steps=steps, report=False, rank0_stdout=rank0_stdout,
            progress=progress,
        ).summary  # fmt: skip
        return ResumedRun(
            layout, self.validation_loss, again["first_validation_loss"], again["validation_loss"], MORE_STEPS
        )

    @property
    def validation_loss(self) -> float:
        """The loss on held-out text at the end, nats a token."""
        return self.result.summary["validation_loss"]

    @property
    def unigram_entropy(self) -> float:
        """The entropy of the validation text's token frequencies, nats a token."""
        return self.result.summary["unigram_entropy"]

    @property
    def failures(self) -> list[str]:
        """Expectations that the tour did not meet, a sentence each."""
        loss, entropy = self.validation_loss, self.unigram_entropy
        checks = [
            (self.comparison.equal_ledger, "the measured ledger differs from the predicted one"),
            (self.comparison.exact_classes_equal, "the measured bytes by class differ from the predicted ones"),
            (loss < entropy, f"the validation loss {loss:.3f} is not below the unigram entropy {entropy:.3f}"),
        ]
        return [sentence for holds, sentence in checks if not holds]

    def write_page(self) -> Path:
        """Write report.html into the run directory: the run in the studio, and `LARGE` on the last of `CLUSTERS`.

        Raises `UserError` when it cannot be written.
        """
        out = self.result.out.absolute()
        state = {
            "model": LARGE, "cluster": CLUSTERS[-1], "zero": 3, "recompute": "full", "seq": LARGE_SEQ,
            "batch": Cluster.parse(CLUSTERS[-1]).devices,
        }  # fmt: skip
        views = (f"runs?{urlencode({'run': out.name})}", f"memory?{urlencode(state)}")
        write_export(out / "report.html", *views, runs=out.parent)
        return self.result.out / "report.html"


def learn(out: Path, rank0_stdout: int, progress: Callable[[str], None]) -> Tour:
    """Train `SMALL` on four processes into `out`. rank0_stdout: file descriptor that gets the ranks' lines. progress:
    gets what is done before.

    Raises what `train` raises.
    """
    result = train(
        SMALL,
        LAYOUT,
        WORKLOAD,
        "stdlib",
        steps=STEPS,
        out=out,
        optimizer=OPTIMIZER,
        rank0_stdout=rank0_stdout,
        progress=progress,
        max_bytes=TEXT_BYTES,
        validate_every=VALIDATE_EVERY,
        report=True,
        tensorboard=False,
    )
    return Tour(result, compare(result.predicted, result.report))
