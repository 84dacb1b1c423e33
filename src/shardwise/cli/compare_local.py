"""Strategies side by side as this machine runs them: each layout starts, answers the same prompts, and ends."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from shardwise.cli.declare import changed
from shardwise.cli.engine import job_of
from shardwise.codec import Json
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DP, PP
from shardwise.layout.serving import check_generation, lockstep_axes, plan_of
from shardwise.planner.strategies import decode_round
from shardwise.predict.traffic.ring_volume import Volume, ring_volume
from shardwise.report.table import rows_by_name
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_share, format_things, format_time
from shardwise.runtime.job.launch import RunFailed
from shardwise.runtime.job.locks import temporary_folder
from shardwise.serving.job import ServingJob
from shardwise.serving.messages import Finished, Sampling, Token
from shardwise.serving.recording import StepRecord, read_notes
from shardwise.serving.service import Service

Noted = Mapping[int, Sequence[StepRecord]]
"""Rank -> its notes."""
_Moved = tuple[Volume | None, float | None, float | None]
"""Bytes that a rank sends per token, its collectives and messages, and its seconds of waiting."""


@dataclass(frozen=True)
class Here(Json):
    """One strategy as it ran. None is what so few tokens do not tell."""

    layout: Layout
    tokens: tuple[tuple[int, ...], ...]
    """Of each answer."""
    ring_bytes_of_a_token: Volume | None
    """Sent by the rank that sends most, in the rounds of decoding that have all sequences."""
    predicted_ring_bytes_of_a_token: Volume
    collectives_of_a_token: float | None
    """Its collectives and messages."""
    waiting_seconds_of_a_token: float | None
    """Seconds for which it stood still for them."""
    first_token_seconds: float
    """Seconds of the slowest answer."""
    token_seconds: float | None
    """From one token to the next, the median."""
    growth: float | None
    """Change of the answers' last quarters over their first, as a share."""
    tokens_per_second: float | None
    """From the first token of all to the last."""
    parameter_bytes: int
    """Of the first rank."""
    cache_bytes: int | None
    """Of the fullest rank, before the last tokens."""


def measure(args: Any, layouts: Sequence[Layout], prompts: Sequence[Sequence[int]], output: int,
            echo: Callable[[str], object]) -> list[Here]:  # fmt: skip
    """Run each layout on the weights in `args.model`. Raises `UserError`, and `RunFailed` when a rank dies."""
    jobs = []
    for layout in layouts:
        # One prompt is every rank's under weight gathering; several are shared out.
        same = layout.stage == 3 and len(prompts) == 1
        prompts_of, batch = "same" if same else None, max(len(prompts), args.batch or 1)
        jobs.append(job_of(changed(args, layout=str(layout), prompts=prompts_of, precision=None, batch=batch)))
        check_generation(layout, jobs[-1].model)
    return [_run(job, prompts, output, echo) for job in jobs]


def _run(job: ServingJob, prompts: Sequence[Sequence[int]], output: int, echo: Callable[[str], object]) -> Here:
    with temporary_folder() as notes:
        job = replace(job, report=str(notes))
        with Service(job, echo=lambda line: echo(f"{job.layout}: {line}")) as service:
            ready = service.start()
            echo(f"{job.layout}: answering")
            answers = _answers(service, prompts, output)
            service.drain()
        noted = {rank: read_notes(notes, rank) for rank in range(job.layout.ranks)}
    gaps = [[times[i + 1] - times[i] for i in range(1, len(times) - 1)] for times, _ in answers]
    ended, began = max(times[-1] for times, _ in answers), min(times[1] for times, _ in answers)
    later = sum(map(len, gaps))
    cached = max(note.kv_bytes for notes_of_rank in noted.values() for note in notes_of_rank)
    predicted = decode_round(job.model, job.layout, len(prompts))
    sent, calls, waited = _moved(job, noted, len(prompts), predicted.made)
    return Here(
        job.layout, tuple(tuple(tokens) for _, tokens in answers), sent, predicted.volume_of_token, calls, waited,
        max(times[1] - times[0] for times, _ in answers), median(chain(*gaps)) if later else None, _growth(gaps),
        later / (ended - began) if later else None, ready.parameter_bytes, cached if later else None,
    )  # fmt: skip


def _growth(gaps: Sequence[Sequence[float]]) -> float | None:
    """Of the last quarter of each answer's gaps between tokens over its first, medians of all."""
    if min(map(len, gaps)) < 2:
        return None
    quarters = [(item[: max(1, len(item) // 4)], item[-max(1, len(item) // 4) :]) for item in gaps]
    first, last = (median(chain(*result)) for result in zip(*quarters, strict=True))
    return last / first - 1


def _answers(service: Service, prompts: Sequence[Sequence[int]], output: int) -> list[tuple[list[float], list[int]]]:
    """For each prompt when it was asked and when each token came, and the tokens. Raises `RunFailed`."""
    over = threading.Semaphore(0)
    errors: list[str] = []

    def sink_of(times: list[float], tokens: list[int]) -> Callable[[Token | Finished], None]:
        def sink(said: Token | Finished) -> None:
            if isinstance(said, Finished):
                errors.extend([said.error] if said.reason == "error" else [])
                over.release()
            else:
                times.append(time.perf_counter())
                tokens.append(said.token)

        return sink

    answers: list[tuple[list[float], list[int]]] = []
    for prompt in prompts:
        answers.append(([time.perf_counter()], []))
        service.submit(prompt, Sampling(max_tokens=output), sink_of(*answers[-1]))
    for _ in prompts:
        over.acquire()
    if errors:
        raise RunFailed(errors[0])
    return answers


def _moved(job: ServingJob, noted: Noted, sequences: int, made: int) -> _Moved:
    """By the rank that sends most, in its full rounds; nothing where there was none."""
    rounds = {rank: _full_rounds(job, noted, rank, sequences) for rank in noted}
    results = [_of_rank(job, rank, turns) for rank, turns in rounds.items() if turns]
    if not results:
        return None, None, None
    volume, calls, waited = max(results, key=lambda each: each[0].total)
    return volume.over(made), calls / made, waited / made


def _full_rounds(job: ServingJob, noted: Noted, rank: int, sequences: int) -> list[list[StepRecord]]:
    """The rank's notes of the turns, as many together as there are stages, in which each sequence of the ranks in step
    has one more token: others still read prompts, or are over for some."""
    mesh = Mesh.of(job.layout, job.model)
    group = mesh.group(lockstep_axes(job.layout), rank) if job.replicas > 1 else (rank,)
    in_step = list({mesh.index(DP, item): item for item in group}.values())
    places = [mesh.index(DP, item) for item in in_step] if job.replicas > 1 else [0]
    whole = sum(sequences // job.replicas + (place < sequences % job.replicas) for place in places)
    together = list(zip(*(noted[item] for item in in_step), strict=False))
    results: list[list[StepRecord]] = []
    turn = 0
    while turn + job.layout.pp <= len(together):
        notes = [note for turns in together[turn : turn + job.layout.pp] for note in turns]
        if sum(note.tokens for note in notes) == whole and all(note.phase == "decode" for note in notes):
            results.append(list(noted[rank][turn : turn + job.layout.pp]))
            turn += job.layout.pp
        else:
            turn += 1
    return results


def _of_rank(job: ServingJob, rank: int, rounds: Sequence[Sequence[StepRecord]]) -> tuple[Volume, float, float]:
    """(ring volume, collectives and messages, seconds of waiting) of a round, the mean."""
    plan = plan_of(job.model, job.layout, Mesh.of(job.layout, job.model).index(PP, rank))
    notes = [note for item in rounds for note in item]
    rows = [row for note in notes for row in note.ledger]
    calls, waited = sum(row.count for row in rows), sum(note.waited for note in notes)
    return ring_volume(rows, plan).over(len(rounds)), calls / len(rounds), waited / len(rounds)


def tables(name: str, measured: Sequence[Here], prompts: int) -> Iterator[Renderable]:
    """All that is printed of what was measured."""
    many = f"{prompts} sequences at a time" if prompts > 1 else "one sequence"
    count = len(measured[0].tokens[0])
    yield f"{name}, measured here: {many}, {format_things(count, 'token')} each\n"
    yield rows_by_name(
        [str(one.layout) for one in measured], [(words, [cell(one) for one in measured]) for words, cell in ROWS]
    )
    yield from (_against(measured[0], one) for one in measured[1:])
    for one in measured:
        if one.ring_bytes_of_a_token is None:
            yield f"{one.layout}: no step decoded all sequences, which a token's traffic needs: more --max-new-tokens"


def _against(base: Here, one: Here) -> str:
    same = "the same tokens" if one.tokens == base.tokens else "other tokens (sums are rounded differently)"
    words = f"{one.layout} against {base.layout}: {same}"
    if one.token_seconds and base.token_seconds:
        words += f", {one.token_seconds / base.token_seconds:.3g} times its seconds a token"
    sent, usual = one.ring_bytes_of_a_token, base.ring_bytes_of_a_token
    if usual and sent and usual.blocks and sent.blocks:
        words += f", {float(sent.blocks / usual.blocks):,.4g} times its bytes for the blocks"
    return words


def _cell(words: Callable[[float], str], of: Callable[[Here], float | Fraction | None]) -> Callable[[Here], str]:
    """A figure in words; blank where it is not known."""
    return lambda one: "" if (value := of(one)) is None else words(float(value))


def _sent(of: Callable[[Volume], Fraction]) -> Callable[[Here], str]:
    return _cell(format_bytes, lambda one: None if one.ring_bytes_of_a_token is None else of(one.ring_bytes_of_a_token))


ROWS: list[tuple[str, Callable[[Here], str]]] = [
    ("a rank sends for a token (ring volume)", _sent(lambda sent: sent.total)),
    ("  predicted", _cell(format_bytes, lambda one: one.predicted_ring_bytes_of_a_token.total)),
    ("  blocks", _sent(lambda sent: sent.blocks)),
    ("  embedding, head, logits", _sent(lambda sent: sent.edges)),
    ("  control, chosen tokens", _sent(lambda sent: sent.other)),
    ("collectives and messages of a token", _cell("{:.4g}".format, lambda one: one.collectives_of_a_token)),
    ("time of a token (median)", _cell(format_time, lambda one: one.token_seconds)),
    ("  of it waiting for other ranks", _cell(format_time, lambda one: one.waiting_seconds_of_a_token)),
    ("  last tokens against first", _cell(partial(format_share, signed=True), lambda one: one.growth)),
    ("tokens/s, all sequences", _cell("{:.4g}".format, lambda one: one.tokens_per_second)),
    ("prompt until its first token", _cell(format_time, lambda one: one.first_token_seconds)),
    ("weights that stay on a rank", _cell(format_bytes, lambda one: one.parameter_bytes)),
    ("cache of a rank before the last tokens", _cell(format_bytes, lambda one: one.cache_bytes)),
]
