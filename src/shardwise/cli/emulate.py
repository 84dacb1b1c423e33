"""`shardwise generate --emulate`: the bubble of a prompt that goes through the stages in chunks, beside its simulation.

The engine runs as it does for a prompt; only a stage's arithmetic is replaced by a wait.
"""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from shardwise.cli.engine import job_of
from shardwise.cli.output import print_json
from shardwise.cli.prompts import read_prompts
from shardwise.errors import UserError
from shardwise.report.units import format_share, format_time
from shardwise.schedule.pipeline.times import seconds_of
from shardwise.serving.job import Ready, ServingJob
from shardwise.serving.messages import Finished, Sampling, Token

if TYPE_CHECKING:
    from shardwise.serving.recording import Filled
    from shardwise.serving.service import Service

ROUNDS = 5
"""Times that the prompt is read, after one that is not counted."""


def run(args: Any) -> int:
    from shardwise.runtime.job.locks import temporary_folder
    from shardwise.serving import recording

    seconds = seconds_of(args.emulate or "")
    # Options of computations, which emulation replaces.
    if not seconds > 0:
        raise UserError(f"--emulate {args.emulate}: give the time of a chunk, such as 20ms")
    if len(args.prompt) + len(args.prompt_file) + len(args.tokens) > 1:
        raise UserError("--emulate reads one prompt: give one, or none for a whole context")
    if args.device not in (None, "cpu"):
        raise UserError("--emulate needs no GPU: leave --device out")
    with temporary_folder() as notes:
        job = job_of(args, str(notes))
        prompt = [0] * (job.context - 1)
        if args.prompt or args.prompt_file or args.tokens:
            ((prompt,), _) = read_prompts(args)
        job = replace(job, context=len(prompt) + 1, batch=1, pages=0, reuse=False, emulate=seconds)
        if job.layout.pp == 1 or job.layout.dp > 1:
            raise UserError(f"--emulate measures one pipeline, which {job.layout} is not: give --layout pp=2")
        ready = _read(job, prompt)
        measured = recording.measured(job, notes)[1:]
    simulated = recording.simulated(job.layout.pp, measured[0].chunks, seconds, ready.hop)
    _show(job, ready, measured, simulated, as_json=args.json)
    return 0


def _read(job: ServingJob, prompt: list[int]) -> Ready:
    """Have the prompt read again and again, one at a time. Raises `RunFailed` when a rank dies."""
    from shardwise.serving.service import Service

    with Service(job) as service:
        service.check(prompt, Sampling(max_tokens=1))
        ready = service.start()
        for _ in range(1 + ROUNDS):
            _once(service, prompt)
        service.drain()
    return ready


def _once(service: Service, prompt: list[int]) -> None:
    from shardwise.runtime.job.launch import RunFailed

    events: SimpleQueue[Token | Finished] = SimpleQueue()
    service.submit(prompt, Sampling(max_tokens=1), events.put)
    while not isinstance(event := events.get(), Finished):
        pass
    if event.reason == "error":
        raise RunFailed(event.error)


def _show(job: ServingJob, ready: Ready, measured: list[Filled], simulated: Filled, *, as_json: bool) -> None:
    from shardwise.serving.recording import median

    middle = median(measured)
    ratio = middle.bubble / simulated.bubble
    if as_json:
        print_json({
            "layout": str(job.layout), "stages": job.layout.pp, "chunks": middle.chunks, "chunk_tokens": job.chunk,
            "pretend_s": job.emulate, "transport": ready.transport, "hop_s": ready.hop,
            "bubbles": [item.bubble for item in measured], "measured": _figures(middle),
            "simulated": _figures(simulated), "ratio": ratio,
        })  # fmt: skip
        return
    print(
        f"{job.layout.pp} stages, {middle.chunks} chunks of {job.chunk} tokens; a stage waits "
        f"{format_time(job.emulate)} for a chunk, a message between two of them takes {format_time(ready.hop)}"
    )
    every = ", ".join(format_share(item.bubble) for item in measured)
    print(f"bubble over ideal  {format_share(middle.bubble)} measured, the median of {every}; "
          f"{format_share(simulated.bubble)} simulated; ratio {ratio:.3f}")  # fmt: skip
    print(f"makespan           {format_time(middle.makespan)} measured, {format_time(simulated.makespan)} simulated")


def _figures(one: Filled) -> dict[str, Any]:
    return {"bubble_over_ideal": one.bubble, "makespan_s": one.makespan, "busy_s": list(one.busy)}
