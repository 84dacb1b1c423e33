"""Strategies side by side as this machine runs them: each layout starts, answers the same prompts, and ends."""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shardwise.predict.generation.comparison import Round, decode_round
from shardwise.predict.generation.split import check_generation, plan_of
from shardwise.predict.generation.volume import Volume, ring_volume

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.layout import Layout
    from shardwise.report.step_report import Role, StepReport
    from shardwise.serving.job import ServingJob
    from shardwise.serving.messages import Finished, Token


@dataclass(frozen=True)
class Here:
    """One strategy as it ran. tokens: of each answer. sent: by the rank that sends most, for a token, in decoding
    turns; calls: its collectives and messages; waited: seconds for which it stood still for them. first: seconds to
    the first token, the slowest answer's; token: from one token to the next, the median; growth: of its last quarter
    over its first, as a share. rate: tokens/s from the first token of all to the last."""

    layout: Layout
    tokens: tuple[tuple[int, ...], ...]
    predicted: Round
    sent: Volume
    calls: float
    waited: float
    first: float
    token: float
    growth: float
    rate: float
    parameter_bytes: int
    cache_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout),
            "tokens": [list(answer) for answer in self.tokens],
            "ring_bytes_of_a_token": self.sent.to_json(),
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
        given = vars(args) | {"layout": str(layout), "same": same, "precision": None}
        given["batch"] = max(len(prompts), args.batch or 1)
        jobs.append(job_of(argparse.Namespace(**given)))
        check_generation(layout, jobs[-1].model)
    return [_run(job, prompts, output, echo) for job in jobs]


def _run(job: ServingJob, prompts: Sequence[Sequence[int]], output: int, echo: Callable[[str], object]) -> Here:
    from dataclasses import replace

    from shardwise.serving.recording import reports
    from shardwise.serving.service import Service

    with TemporaryDirectory(prefix="shardwise-notes-") as notes:
        job = replace(job, report=notes)
        with Service(job, echo=lambda line: echo(f"{job.layout}: {line}")) as service:
            ready = service.start()
            echo(f"{job.layout}: answering")
            told = _answers(service, prompts, output)
            service.drain()
        decoding = _decoding(reports(job, Path(notes)))
    gaps = [times[i + 1] - times[i] for times, _ in told for i in range(1, len(times) - 1)]
    quarter = max(1, len(gaps) // 4)
    ended, began = max(times[-1] for times, _ in told), min(times[1] for times, _ in told)
    made = sum(len(tokens) for _, tokens in told)
    sent, calls, waited, cached = _moved(job, decoding)
    return Here(
        job.layout, tuple(tuple(tokens) for _, tokens in told), decode_round(job.model, job.layout, len(prompts)),
        sent, calls, waited, max(times[1] - times[0] for times, _ in told), median(gaps) if gaps else 0.0,
        median(gaps[-quarter:]) / median(gaps[:quarter]) - 1 if gaps else 0.0,
        (made - len(told)) / (ended - began) if ended > began else 0.0, ready.parameter_bytes, cached,
    )  # fmt: skip


def _decoding(reports: Iterator[tuple[str, StepReport]]) -> list[StepReport]:
    """The decoding turns, without each replica's last one: it counts turns of control after the last answer, too."""
    of_replica: dict[str, list[StepReport]] = defaultdict(list)
    for name, report in reports:
        if report.workload["phase"] == "decode":
            of_replica[name.partition("turn-")[0]].append(report)
    return [report for turns in of_replica.values() for report in (turns[:-1] or turns)]


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

    told: list[tuple[list[float], list[int]]] = []
    for prompt in prompts:
        told.append(([time.perf_counter()], []))
        service.submit(prompt, Sampling(max_tokens=output), sink_of(*told[-1]))
    for _ in prompts:
        over.acquire()
    if errors:
        raise RunFailed(errors[0])
    return told


def _moved(job: ServingJob, decoding: Sequence[StepReport]) -> tuple[Volume, float, float, int]:
    """(what a rank sends for a token, collectives for it, seconds of waiting, bytes of the cache in the end) of the
    rank that sends most, over all decoding turns."""
    sums: dict[int, list[Any]] = defaultdict(lambda: [Fraction(0), Fraction(0), Fraction(0), 0, 0.0, 0])
    for report in decoding:
        for role in report.roles:
            found = _of_role(job, role)
            for rank in role.ranks:
                sums[rank] = [
                    had + new for had, new in zip(sums[rank], [*found, report.workload["tokens"]], strict=True)
                ]
    cached = max((max(map(int, report.workload["kv_bytes"].values())) for report in decoding), default=0)
    if not sums:
        return Volume(), 0.0, 0.0, cached
    *volume, calls, waited, tokens = max(sums.values(), key=lambda each: sum(each[:3]) / max(1, each[5]))
    tokens = max(1, tokens)
    return Volume(*volume).over(tokens), calls / tokens, waited / tokens, cached


def _of_role(job: ServingJob, role: Role) -> list[Any]:
    from shardwise.layout import Grid

    stage = Grid.of(job.layout, job.model).coordinates(role.ranks[0])["pp"]
    volume = ring_volume(role.ledger, plan_of(job.model, job.layout, stage))
    waited = sum(row.wait_s or 0.0 for row in role.transport)
    return [volume.blocks, volume.edges, volume.other, sum(row.count for row in role.ledger), waited]


def tables(name: str, found: Sequence[Here], prompts: int) -> Iterator[RenderableType]:
    """All that is printed of what was measured."""
    from shardwise.cli.output import side_by_side

    many = f"{prompts} sequences at a time" if prompts > 1 else "one sequence"
    yield f"{name}, measured here: {many}, {len(found[0].tokens[0])} tokens each\n"
    yield side_by_side(
        [str(one.layout) for one in found], [(words, [cell(one) for one in found]) for words, cell in ROWS]
    )
    yield from (_against(found[0], one) for one in found[1:])


def _against(base: Here, one: Here) -> str:
    same = "the same tokens" if one.tokens == base.tokens else "other tokens (sums are rounded differently)"
    words = f"{one.layout} against {base.layout}: {same}, {one.token / base.token:.3g} times its seconds a token"
    if base.sent.blocks and one.sent.blocks:
        words += f", {float(one.sent.blocks / base.sent.blocks):,.4g} times its bytes for the blocks"
    return words


def _bytes(of: Callable[[Here], float | Fraction]) -> Callable[[Here], str]:
    from shardwise.report.units import format_bytes

    return lambda one: format_bytes(float(of(one)))


def _time(of: Callable[[Here], float]) -> Callable[[Here], str]:
    from shardwise.report.units import format_time

    return lambda one: format_time(of(one))


def _share(one: Here) -> str:
    from shardwise.report.units import format_share

    return format_share(one.growth, signed=True)


ROWS: list[tuple[str, Callable[[Here], str]]] = [
    ("a rank sends for a token (ring volume)", _bytes(lambda one: one.sent.total)),
    ("  predicted", _bytes(lambda one: one.predicted.volume_of_token.total)),
    ("  blocks", _bytes(lambda one: one.sent.blocks)),
    ("  embedding, head, logits", _bytes(lambda one: one.sent.edges)),
    ("  control, chosen tokens", _bytes(lambda one: one.sent.other)),
    ("collectives and messages of a token", lambda one: f"{one.calls:.4g}"),
    ("time of a token (median)", _time(lambda one: one.token)),
    ("  of it waiting for other ranks", _time(lambda one: one.waited)),
    ("  last tokens against first", _share),
    ("tokens/s, all sequences", lambda one: f"{one.rate:.4g}"),
    ("prompt until its first token", _time(lambda one: one.first)),
    ("weights of a rank", _bytes(lambda one: one.parameter_bytes)),
    ("cache of a rank at the end", _bytes(lambda one: one.cache_bytes)),
]
