"""Usual workload of a training step, for numbers that are not given: the model's length of sequences, its batch."""

from dataclasses import replace

from shardwise.layout.workload import Workload
from shardwise.model.parameters import Model, count
from shardwise.records import dataclass

LONGEST = 8192
"""Tokens of a sequence in pre-training: longer contexts are trained at its end (Llama 3, 2024, section 3.4.2)."""

BATCHES = ((1e9, 1 << 19), (3e9, 1 << 20), (20e9, 1 << 21))
"""(parameters up to, tokens per step): GPT-3, table 2.1, rounded to powers of two."""
LARGEST = 1 << 22
"""Tokens per step of larger models: Llama 2, section 2.2, and Llama 3, section 3.4.1."""

SEQUENCES = 4
"""Sequences of a micro-batch on this machine."""
PROMPT, OUTPUT, CLIENTS = 1024, 256, 64
"""Tokens of a prompt and of an answer, and clients, where they are not given: of a chat that has begun."""


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
        usual = "usual" if batch * seq == tokens else f"about the usual {tokens:,}"
        notes.append(f"--batch {batch}: {batch * seq:,} tokens per step, {usual} for this size")
    return UsualWorkload(seq, batch, tuple(notes))


def usual_training(model: Model, seq: int | None, batch: int | None, multiple: int) -> UsualWorkload:
    """As `usual_workload`, for a run of this machine's processes: `SEQUENCES` times `multiple` in a step."""
    usual = usual_workload(model, seq, batch or SEQUENCES * multiple)
    note = () if batch else (f"--batch {usual.batch}: {SEQUENCES} sequences in a replica's micro-batch",)
    return replace(usual, notes=(*usual.notes, *note))


def usual_serving(
    model: Model, prompt: int | None, output: int | None, concurrency: int | None, clients: bool = True
) -> tuple[Workload, tuple[str, ...]]:
    """The given numbers of a server's requests, and usual ones for None, with notes on these. clients:
    whether they count, too; 1 where not."""
    positions, notes = model.max_positions, []
    if output is None:
        output = min(OUTPUT, max(1, positions - prompt if prompt else positions // 4))
        notes.append(f"--output {output}: tokens per answer")
    if prompt is None:
        prompt = max(1, min(PROMPT, positions - output))
        notes.insert(0, f"--prompt {prompt}: tokens per prompt")
    if concurrency is None and clients:
        concurrency = CLIENTS
        notes.append(f"--concurrency {concurrency}: clients with one request running")
    return Workload(prompt=prompt, output=output, concurrency=1 if concurrency is None else concurrency), tuple(notes)


def _usual_seq(model: Model) -> tuple[int, str]:
    if model.trace:
        return model.trace.seq, "the traced length"
    context = model.max_positions
    if context <= LONGEST:
        return context, f"the context length of {model.name}"
    return LONGEST, f"the usual length of pre-training; the context of {model.name} is {context}"


def odd_part(number: int) -> int:
    """What is left of a number without its factors of two: a usual batch is a multiple of it on so many devices."""
    return number // (number & -number)
