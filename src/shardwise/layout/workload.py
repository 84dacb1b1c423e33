"""`Workload`: what is asked of the model, apart from how it is split."""

from typing import Self

from shardwise.codec import EVERY, Json
from shardwise.errors import UserError, did_you_mean
from shardwise.layout.layout import Layout
from shardwise.layout.optimizers import DEFAULT, ELSEWHERE, OPTIMIZERS, states_of
from shardwise.options import option
from shardwise.records import dataclass

MOST = 1_000_000_000
"""Limit of each number of a workload, so that counts over a step fit 64-bit integers."""


@dataclass(frozen=True)
class Workload(Json):
    """A training step: `batch` sequences of `seq` tokens over all ranks. Or serving: prompt, output and concurrency."""

    json_omits = EVERY

    seq: int = option(0, "tokens per sequence, such as 8192 or 8k", metavar="N", shown="", tokens=True, positive=True)
    batch: int = option(0, "sequences per step, over all ranks", metavar="N", shown="", tokens=True, positive=True)
    isolate_documents: bool = option(False, "attention does not cross documents")
    optimizer: str = option(
        DEFAULT,
        "adamw keeps two moments per parameter, momentum (SGD with momentum) one, sgd none; muon and adamw8bit are for "
        "--engine",
        choices=(*OPTIMIZERS, *ELSEWHERE),
    )
    prompt: int = 0
    output: int = 0
    concurrency: int = 0

    def __post_init__(self) -> None:
        for key in ("seq", "batch", "prompt", "output", "concurrency"):
            value = getattr(self, key)
            if type(value) is not int or value < 0:
                raise UserError(f"workload: {key} must be a positive integer, not {value!r}")
            if value > MOST:
                raise UserError(f"workload: {key} must be at most {MOST:,}, not {value:,}")
        known = (*OPTIMIZERS, *ELSEWHERE)
        if self.optimizer not in known:
            hint = did_you_mean(str(self.optimizer), known, "must be one of")
            raise UserError(f"workload: optimizer {self.optimizer!r}: {hint}")
        if (self.seq > 0) != (self.batch > 0):
            raise UserError("workload: a training step needs both a sequence length and a batch (--seq and --batch)")

    @property
    def batch_words(self) -> str:
        """Such as 256 sequences of 8192 tokens."""
        return f"{self.batch} sequence{'s' * (self.batch != 1)} of {self.seq} tokens"

    @property
    def states(self) -> tuple[str, ...]:
        """Arrays of optimizer state per parameter: master weights, then moments."""
        return states_of(self.optimizer)

    @classmethod
    def of_rows(cls, layout: Layout, micro_batches: int) -> Self:
        """So many micro-batches of rows whose length does not matter."""
        return cls(seq=1, batch=layout.dp * layout.micro * micro_batches)

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches that each data-parallel rank runs in one step (gradient accumulation at pp=1).

        Raises `UserError` naming the nearest batches that divide when `batch` does not.
        """
        each = layout.dp * layout.micro
        if self.batch < 1 or self.batch % each:
            below, above = self.batch // each * each, (self.batch // each + 1) * each
            nearest = f"{below} or {above}" if below else str(above)
            raise UserError(
                f"batch {self.batch} cannot be divided among dp x micro = {layout.dp} x {layout.micro}; "
                f"nearest that can: {nearest}"
            )
        return self.batch // each
