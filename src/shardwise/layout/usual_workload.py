"""Usual workload of a training step, for numbers that are not given: the model's length of sequences, its batch."""

from shardwise.layout.workload import Workload
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model, count
from shardwise.records import dataclass

LONGEST = 8192
"""Tokens of a sequence in pre-training: longer contexts are trained at its end (Llama 3, 2024, section 3.4.2)."""

BATCHES = ((1e9, 1 << 19), (3e9, 1 << 20), (20e9, 1 << 21))
"""(parameters up to, tokens per step): GPT-3, table 2.1, rounded to powers of two."""
LARGEST = 1 << 22
"""Tokens per step of larger models: Llama 2, section 2.2, and Llama 3, section 3.4.1."""


@dataclass(frozen=True)
class UsualWorkload:
    """Length of sequences and batch of a training step, and where those that were not given come from."""

    seq: int
    batch: int
    notes: tuple[str, ...]

    @property
    def workload(self) -> Workload:
        return Workload(self.seq, self.batch)


def usual_workload(model: Model, seq: int | None, batch: int | None, multiple: int = 1) -> UsualWorkload:
    """The given numbers, and usual ones for None.

    multiple: a usual batch is a multiple of it, as a number of replicas.
    """
    notes = []
    if seq is None:
        seq, note = _usual_seq(model)
        notes.append(f"--seq {seq}: {note}")
    if batch is None:
        tokens = next((tokens for most, tokens in BATCHES if count(model) <= most), LARGEST)
        batch = (1 << max(0, (tokens // max(seq, 1) // multiple).bit_length() - 1)) * multiple
        notes.append(f"--batch {batch}: {batch * seq:,} tokens per step, about the usual {tokens:,} for this size")
    return UsualWorkload(seq, batch, tuple(notes))


def _usual_seq(model: Model) -> tuple[int, str]:
    if isinstance(model, Blueprint):
        return model.trace.seq if model.trace else LONGEST, "the traced length"
    context = model.max_positions
    if context <= LONGEST:
        return context, f"the context length of {model.name}"
    return LONGEST, f"the usual length of pre-training; the context of {model.name} is {context}"


def odd_part(number: int) -> int:
    """What is left of a number without its factors of two: a usual batch is a multiple of it on so many devices."""
    return number // (number & -number)
