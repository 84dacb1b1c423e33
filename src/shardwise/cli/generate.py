"""Continue prompts with a model that is split over the local processes its layout asks for.

MODEL is a Hugging Face folder, or a checkpoint or run of `shardwise train`, whatever layout it was trained under.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from shardwise.cli import emulate
from shardwise.cli.declare import CommandOptions, arg, borrow, given, word
from shardwise.cli.engine import ServingOptions, fit_of, job_of
from shardwise.cli.interrupts import ended_as_interrupted
from shardwise.cli.output import print_json, progress
from shardwise.cli.prompts import PromptOptions, read_prompts
from shardwise.cli.run_file import ConfigOptions
from shardwise.cli.show import compare_table
from shardwise.cli.show.compare_table import StrategyOptions
from shardwise.codec import keyed
from shardwise.errors import UserError, os_errors
from shardwise.records import dataclass
from shardwise.runtime.installed import require
from shardwise.runtime.job.launch import RunFailed
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.job.output import say
from shardwise.serving.job import Ready, ServingJob
from shardwise.serving.messages import Finished, Sampling, Token

if TYPE_CHECKING:
    from shardwise.serving.service import Service
    from shardwise.serving.text import Stream

MAX_TOKENS = 64


@dataclass
class SamplingOptions(CommandOptions):
    """The choice of tokens."""

    title = "how tokens are chosen"
    borrowed = borrow((Sampling, "max_tokens temperature top_k top_p seed"))
    stop: tuple[str, ...] = arg("end an answer before this text", "TEXT", ())


@dataclass
class GenerateOptions(StrategyOptions, ServingOptions, SamplingOptions, PromptOptions, ConfigOptions):
    title = "what it cost"
    model: str = word("a folder of weights; with --compare also a catalog's name", "MODEL")
    report: Path | None = arg("write a StepReport per engine step to a new folder", "DIR")
    emulate: str | None = arg(
        "instead of generating: every stage of a pipeline waits TIME (20ms) for a chunk in place of its arithmetic; "
        "prints the bubble of the prompt (of a whole context where none is given) as measured and as simulated",
        "TIME",
        excludes="report max_tokens batch cache",
        idle="is for answers, and --emulate reads a prompt and generates nothing: leave it out",
    )


def run(args: GenerateOptions) -> int:
    with ended_as_interrupted():
        return _run(args)


def _run(args: GenerateOptions) -> int:
    if args.compare is not None or any(name in args.named for name in compare_table.COMPARED.split()):
        return compare_table.run(args)
    require("generation", "torch")
    if args.emulate is not None:
        return emulate.run(args)
    sampling = Sampling(**{"max_tokens": MAX_TOKENS, **given(args, Sampling)})
    with _report_folder(args.report) as notes:
        job = job_of(args, notes)
        prompts, text = read_prompts(args)
        job = _fitted(args, job, prompts, sampling)
        # Who has a tokenizer sees text; its end-of-text tokens end answers.
        stops = text.stop_tokens if text else ()
        answers = [_Answer(tokens, text.stream(args.stop) if text else None) for tokens in prompts]
        from shardwise.serving.service import Service

        with Service(job, echo=progress) as service:
            for answer in answers:
                service.check(answer.prompt, sampling)
            ready = service.start()
            progress()
            seconds = _generate(service, answers, sampling, stops, quiet=args.json)
            service.drain()
        if args.report:
            _write_reports(job, Path(notes or "."), args.report, quiet=args.json)
    if args.json:
        print_json(_summary(job, ready, answers, seconds))
    return 0


def _fitted(args: GenerateOptions, job: ServingJob, prompts: list[list[int]], sampling: Sampling) -> ServingJob:
    """The engine with a cache for these prompts, unless --cache is given. Raises `UserError` when weights
    and cache do not fit here."""
    if args.cache is None:
        longest = max(map(len, prompts)) + sampling.max_tokens
        context = args.context or min(max(longest, 1), job.model.max_positions)
        batch = min(job.batch, len(prompts)) if args.batch is None else job.batch
        job = replace(job, context=context, batch=batch, pages=0)
    fit = fit_of(job)
    if not fit.fits:
        raise UserError(fit.refusal())
    return job


@dataclass
class _Answer:
    """One prompt's. stream: of its text; None without a tokenizer, when tokens are shown. first: seconds to it."""

    prompt: list[int]
    stream: Stream | None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first: float | None = None
    finished: Finished | None = None

    def add(self, answer: Token, stops: tuple[int, ...]) -> str:
        """Text to show now."""
        self.tokens.append(answer.token)
        self.logprobs.append(answer.logprob)
        if self.stream is None:
            new = f"{',' if len(self.tokens) > 1 else ''}{answer.token}"
        else:
            new = self.stream.add(answer.token, shown=answer.token not in stops)
        self.text += new
        return new

    def end(self, finished: Finished) -> str:
        self.finished = finished
        new = self.stream.end() if self.stream else ""
        self.text += new
        return new

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return "stop" if self.stream and self.stream.stopped else self.finished.reason


def _generate(
    service: Service, answers: list[_Answer], sampling: Sampling, stops: tuple[int, ...], quiet: bool
) -> float:
    """Have all prompts continued and show it: one answer as it comes, several each when it is whole. Returns seconds.

    Raises `RunFailed` when a rank dies.
    """
    sampling = replace(sampling, stop_tokens=stops)
    events: SimpleQueue[Token | Finished] = SimpleQueue()
    started = time.monotonic()
    open_ones = {service.submit(answer.prompt, sampling, events.put): answer for answer in answers}
    alone = len(answers) == 1
    while open_ones:
        event = events.get()
        answer = open_ones[event.id]
        if isinstance(event, Finished):
            if event.reason == "error":
                raise RunFailed(event.error)
            del open_ones[event.id]
            before = "" if alone else f"[{answers.index(answer) + 1}] {answer.text}"
            _show(f"{before}{answer.end(event)}\n", quiet)
            continue
        if answer.stream is not None and answer.stream.stopped:
            continue  # chosen before the ranks received the cancellation
        answer.first = answer.first or time.monotonic() - started
        new = answer.add(event, stops)
        if alone:
            _show(new, quiet)
        if answer.stream is not None and answer.stream.stopped:
            service.cancel(event.id)
    return time.monotonic() - started


def _show(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, end="", flush=True)


def _summary(job: ServingJob, ready: Ready, answers: list[_Answer], seconds: float) -> dict[str, Any]:
    made = sum(len(answer.tokens) for answer in answers)
    return {
        "model": job.model.name,
        "layout": str(job.layout),
        **keyed(ready, "context parameter_bytes cache_bytes transport load_s=seconds"),
        "seconds": seconds,
        "tokens_per_s": made / seconds,
        "answers": [
            {
                "prompt_tokens": len(answer.prompt),
                "reused": answer.finished.reused if answer.finished else 0,
                **keyed(answer, "tokens logprobs"),
                "text": answer.text if answer.stream else None,
                **keyed(answer, "reason first_token_s=first"),
            }
            for answer in answers
        ],
    }


@contextmanager
def _report_folder(out: Path | None) -> Iterator[str | None]:
    """A folder for the ranks' notes, beside which the reports will lie. Raises `UserError` where they may not."""
    if out is None:
        yield None
        return
    from shardwise.api import check_unused

    check_unused(out)
    with os_errors(f"make {out}", "; choose another --report"):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with temporary_folder() as notes:
            yield str(notes)
    finally:
        with suppress(OSError):
            out.rmdir()  # which only an empty one can be


def _write_reports(job: ServingJob, notes: Path, out: Path, quiet: bool) -> None:
    from shardwise.serving.recording import reports

    count = 0
    for name, report in reports(job, notes):
        report.write(out / f"{name}.json")
        count += 1
    if not quiet:
        say(f"{count} reports, one per engine step, are in {out}")
