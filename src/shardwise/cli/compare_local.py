"""Strategies side by side as this machine runs them: each layout starts, answers the same prompts, and ends."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from shardwise.layout import Mesh
from shardwise.layout.axes import DP, PP, SHARD
from shardwise.planner.strategies import DecodeStep, decode_round
from shardwise.predict.serving_layout import check_generation, plan_of
from shardwise.predict.traffic.ring_volume import Volume, ring_volume
from shardwise.report.units import format_bytes, format_share, format_time
from shardwise.runtime.job.locks import temporary_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.layout import Layout
    from shardwise.serving.job import ServingJob
    from shardwise.serving.messages import Finished, Token
    from shardwise.serving.recording import StepRecord

    Noted = Mapping[int, Sequence[StepRecord]]
    """Rank -> its notes."""
    _Moved = tuple[Volume | None, float | None, float | None]
    """What a rank sends for a token, its collectives and messages, and its seconds of waiting."""


@dataclass(frozen=True)
class Here:
    """One strategy as it ran. tokens: of each answer. sent: by the rank that sends most, for a token, in the rounds of
    decoding that have all sequences; calls: its collectives and messages; waited: seconds for which it stood still for
    them. first: seconds to the first token, the slowest answer's; token: from one token to the next, the median;
    growth: of the answers' last quarters over their first, as a share. rate: tokens/s from the first token of all to
    the last. parameter_bytes: of the first rank; cache_bytes: of the fullest one, before the last tokens. None is what
    so few tokens do not tell."""

    layout: Layout
    tokens: tuple[tuple[int, ...], ...]
    predicted: DecodeStep
    sent: Volume | None
    calls: float | None
    waited: float | None
    first: float
    token: float | None
    growth: float | None
    rate: float | None
    parameter_bytes: int
    cache_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "tokens": [list(answer) for answer in self.tokens],
            "ring_bytes_of_a_token": self.sent and self.sent.to_json(),
            "predicted_ring_bytes_of_a_token": self.predicted.volume_of_token.to_json(),
            "collectives_of_a_token": self.calls,
            "waiting_seconds_of_a_token": self.waited,
            "first_token_seconds": self.first,
            "token_seconds": self.token,
            "growth": self.growth,
            "tokens_per_second": self.rate,
            "parameter_bytes": self.parameter_bytes,
            "cache_bytes": self.cache_bytes,
        }


def measure(args: argparse.Namespace, layouts: Sequence[Layout], prompts: Sequence[Sequence[int]], output: int,
            echo: Callable[[str], object]) -> list[Here]:  # fmt: skip
    """Run each layout on the weights in `args.model`. Raises `UserError`, and `RunFailed` when a rank dies."""
    from shardwise.cli.engine import job_of

    jobs = []
    for layout in layouts:
        # One prompt is every rank's under weight gathering; several are shared out.
        same = layout.stage == 3 and len(prompts) == 1
        params = vars(args) | {"layout": str(layout), "prompts": "same" if same else None, "precision": None}
        params["batch"] = max(len(prompts), args.batch or 1)
        jobs.append(job_of(argparse.Namespace(**params)))
        check_generation(layout, jobs[-1].model)
    return [_run(job, prompts, output, echo) for job in jobs]


def _run(job: ServingJob, prompts: Sequence[Sequence[int]], output: int, echo: Callable[[str], object]) -> Here:
    from dataclasses import replace

    from shardwise.serving.recording import read_notes
    from shardwise.serving.service import Service

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
    return Here(
        job.layout, tuple(tuple(tokens) for _, tokens in answers), predicted,
        *_moved(job, noted, len(prompts), predicted.made), max(times[1] - times[0] for times, _ in answers),
        median(chain(*gaps)) if later else None, _growth(gaps), later / (ended - began) if later else None,
        ready.parameter_bytes, cached if later else None,
    )  # fmt: skip


def _growth(gaps: Sequence[Sequence[float]]) -> float | None:
    """Of the last quarter of each answer's gaps between tokens over its first, medians of all."""
    if min(map(len, gaps)) < 2:
        return None
    quarters = [(item[: max(1, len(item) // 4)], item[-max(1, len(item) // 4) :]) for item in gaps]
    first, last = (median(chain(*result)) for result in zip(*quarters, strict=True))
    return last / first - 1


def _answers(service: Any, prompts: Sequence[Sequence[int]], output: int) -> list[tuple[list[float], list[int]]]:
    """For each prompt when it was asked and when each token came, and the tokens. Raises `RunFailed`."""
    from shardwise.runtime.job.launch import RunFailed
    from shardwise.serving.messages import Finished, Sampling

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
    in_step = mesh.group(SHARD, rank) if job.replicas > 1 else (rank,)
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


def tables(name: str, measured: Sequence[Here], prompts: int) -> Iterator[RenderableType]:
    """All that is printed of what was measured."""
    from shardwise.report.terminal import rows_by_name

    many = f"{prompts} sequences at a time" if prompts > 1 else "one sequence"
    count = len(measured[0].tokens[0])
    yield f"{name}, measured here: {many}, {count} token{'s' * (count > 1)} each\n"
    yield rows_by_name(
        [str(one.layout) for one in measured], [(words, [cell(one) for one in measured]) for words, cell in ROWS]
    )
    yield from (_against(measured[0], one) for one in measured[1:])
    for one in measured:
        if one.sent is None:
            yield f"{one.layout}: no turn decoded all sequences, so what a token sends is not known: more --max-tokens"


def _against(base: Here, one: Here) -> str:
    same = "the same tokens" if one.tokens == base.tokens else "other tokens (sums are rounded differently)"
    words = f"{one.layout} against {base.layout}: {same}"
    if one.token and base.token:
        words += f", {one.token / base.token:.3g} times its seconds a token"
    if base.sent and one.sent and base.sent.blocks and one.sent.blocks:
        words += f", {float(one.sent.blocks / base.sent.blocks):,.4g} times its bytes for the blocks"
    return words


def _cell(words: Callable[[float], str], of: Callable[[Here], float | Fraction | None]) -> Callable[[Here], str]:
    """A figure in words; blank where it is not known."""
    return lambda one: "" if (value := of(one)) is None else words(float(value))


def _bytes(of: Callable[[Here], float | Fraction | None]) -> Callable[[Here], str]:
    return _cell(format_bytes, of)


def _sent(of: Callable[[Volume], Fraction]) -> Callable[[Here], str]:
    return _bytes(lambda one: None if one.sent is None else of(one.sent))


def _time(of: Callable[[Here], float | None]) -> Callable[[Here], str]:
    return _cell(format_time, of)


ROWS: list[tuple[str, Callable[[Here], str]]] = [
    ("a rank sends for a token (ring volume)", _sent(lambda sent: sent.total)),
    ("  predicted", _bytes(lambda one: one.predicted.volume_of_token.total)),
    ("  blocks", _sent(lambda sent: sent.blocks)),
    ("  embedding, head, logits", _sent(lambda sent: sent.edges)),
    ("  control, chosen tokens", _sent(lambda sent: sent.other)),
    ("collectives and messages of a token", _cell("{:.4g}".format, lambda one: one.calls)),
    ("time of a token (median)", _time(lambda one: one.token)),
    ("  of it waiting for other ranks", _time(lambda one: one.waited)),
    ("  last tokens against first", _cell(partial(format_share, signed=True), lambda one: one.growth)),
    ("tokens/s, all sequences", _cell("{:.4g}".format, lambda one: one.rate)),
    ("prompt until its first token", _time(lambda one: one.first)),
    ("weights that stay on a rank", _bytes(lambda one: one.parameter_bytes)),
    ("cache of a rank before the last tokens", _bytes(lambda one: one.cache_bytes)),
]
