"""Continue prompts with a model that is split over the local processes its layout asks for.

MODEL is a Hugging Face folder, or a checkpoint or run of `shardwise train`, whatever layout it was trained under.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from shardwise.cli import compared, pretended
from shardwise.cli.output import print_json
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.serving.job import Ready, ServingJob
    from shardwise.serving.messages import Finished, Sampling, Token
    from shardwise.serving.service import Service
    from shardwise.serving.text import Stream, Text

MAX_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder of weights; with --compare also a catalog's name")
    _prompts(parser)
    _sampling(parser)
    add_engine(parser)
    group = parser.add_argument_group("what it cost")
    group.add_argument("--report", type=Path, metavar="DIR", help="write a StepReport for every turn to a new folder")
    pretended.add_argument(group)
    compared.add_arguments(parser)


def _prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is continued; several options, several prompts")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a text")
    group.add_argument("--prompt-file", action="append", default=[], type=Path, metavar="FILE", help="a file's text")
    group.add_argument("--tokens", action="append", default=[], metavar="1,2,3", help="token ids; needs no tokenizer")


def _sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"of each answer at most ({MAX_TOKENS})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (0)")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="among the N likeliest, 0 for all (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="among those that have this share (1)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal answers (0)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options of the engine itself."""
    group = parser.add_argument_group("the engine")
    group.add_argument("--layout", metavar="TEXT", default="", help="how it is split: tp=2, pp=2, dp=2,zero=3 (dp=1)")
    group.add_argument("--precision", choices=("bf16", "fp32", "fp64"), help="in place of the layout's (bf16)")
    group.add_argument("--int8", action="store_true", help="keep the blocks' matrices in 8 bits")
    group.add_argument("--context", type=int, default=0, metavar="N", help="tokens of the longest sequence (the "
                       "model's, at most 4,096)")  # fmt: skip
    group.add_argument("--cache", metavar="SIZE", help="of keys and values on each rank, such as 1GiB (as batch and "
                       "context need)")  # fmt: skip
    group.add_argument("--batch", type=int, metavar="N", help="sequences at a time on each replica (8)")
    group.add_argument("--chunk", type=int, metavar="N", help="tokens of prompts in a turn (256)")
    group.add_argument("--no-reuse", action="store_true", help="compute equal beginnings of prompts again")
    group.add_argument("--same", action="store_true", help="under zero=3: all ranks compute all prompts")
    group.add_argument("--transport", choices=("auto", "shared", "gloo"), default="auto", help="what carries "
                       "collectives between CPU ranks (auto)")  # fmt: skip
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (cpu)")
    group.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank's matrix products (1)")
    group.add_argument("--hang", type=float, default=60.0, metavar="S", help="seconds without progress after which to "
                       "give up (60)")  # fmt: skip


def job_of(args: argparse.Namespace, report: str | None = None) -> ServingJob:
    """The engine that the arguments of `add_engine`, and `args.model`, describe. Raises `UserError`."""
    from dataclasses import replace

    from shardwise.cli.quantities import bytes_of
    from shardwise.layout import Layout
    from shardwise.predict.generation.fit import CHUNK, PAGE, largest_page_bytes
    from shardwise.predict.generation.split import check_generation
    from shardwise.serving.job import BATCH, ServingJob, weights_in

    layout = Layout.parse(args.layout)
    if args.precision:
        layout = replace(layout, precision=args.precision)
    folder = Path(args.model).absolute()
    model, _ = weights_in(folder)
    check_generation(layout, model)
    pages = 0
    if args.cache is not None:
        page = largest_page_bytes(model, layout)
        pages = bytes_of("--cache", args.cache) // page
        if not pages:
            raise UserError(f"--cache {args.cache} holds no page: one takes {page:,} bytes")
    return ServingJob(
        model, layout, str(folder), context=args.context, page=PAGE, pages=pages,
        chunk=CHUNK if args.chunk is None else args.chunk, batch=BATCH if args.batch is None else args.batch,
        reuse=not args.no_reuse, prompts="same" if args.same else "own", quantize="int8" if args.int8 else "none",
        transport=args.transport, threads=args.threads, device=args.device, hang=args.hang, report=report,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.compare is not None:
        return compared.run(args)
    if find_spec("torch") is None:
        raise UserError("generation needs torch: pip install 'shardwise[train]'")
    if args.pretend is not None:
        return pretended.run(args)
    sampling = _sampling_of(args)
    with _report_folder(args.report) as notes:
        job = job_of(args, notes)
        prompts, text = read_prompts(args)
        job = _fitted(args, job, prompts, sampling)
        # Who has a tokenizer sees text; its end-of-text tokens end answers.
        stops = text.stop_tokens if text else ()
        asked = [_Answer(tokens, text.stream(args.stop) if text else None) for tokens in prompts]
        from shardwise.serving.service import Service

        with Service(job, echo=_progress) as service:
            for answer in asked:
                service.check(answer.prompt, sampling)
            ready = service.start()
            _progress("")
            seconds = _generate(service, asked, sampling, stops, quiet=args.json)
            service.drain()
        if args.report:
            _write_reports(job, Path(notes or "."), args.report, quiet=args.json)
    if args.json:
        print_json(_summary(job, ready, asked, seconds))
    return 0


def _fitted(args: argparse.Namespace, job: ServingJob, prompts: list[list[int]], sampling: Sampling) -> ServingJob:
    """The engine with a cache for these prompts, where nobody has asked for another. Raises `UserError` when weights
    and cache do not fit here."""
    from dataclasses import replace

    from shardwise.cli.serve import fit_of

    if args.cache is None:
        longest = max(map(len, prompts)) + sampling.max_tokens
        context = args.context or min(max(longest, 1), job.model.max_positions)
        batch = min(job.batch, len(prompts)) if args.batch is None else job.batch
        job = replace(job, context=context, batch=batch, pages=0)
    fit = fit_of(job)
    if not fit.fits:
        raise UserError(fit.refusal())
    return job


def _sampling_of(args: argparse.Namespace) -> Sampling:
    from shardwise.serving.messages import Sampling

    count = MAX_TOKENS if args.max_tokens is None else args.max_tokens
    return Sampling(count, args.temperature, args.top_k, args.top_p, args.seed)


def read_prompts(args: argparse.Namespace) -> tuple[list[list[int]], Text | None]:
    """(token ids of every prompt, what makes text of tokens where something does). Raises `UserError`."""
    from shardwise.serving.job import tokenizer_of
    from shardwise.serving.text import Text

    texts = list(args.prompt)
    for file in args.prompt_file:
        try:
            texts.append(file.read_text())
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"{file} is not UTF-8 text") from None
    if not texts and not args.tokens:
        raise UserError("nothing to continue: give --prompt TEXT, --prompt-file FILE or --tokens 1,2,3")
    text = Text.open(args.model) if texts or args.stop or tokenizer_of(args.model) else None
    prompts = [text.encode(each) for each in texts] if text else []
    return prompts + [_ids(each) for each in args.tokens], text


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--tokens {text}: give token ids, such as 1,2,3") from None


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
        """What is to be shown now."""
        self.tokens.append(answer.token)
        self.logprobs.append(answer.logprob)
        if self.stream is None:
            new = f"{',' if len(self.tokens) > 1 else ''}{answer.token}"
        else:
            new = "" if answer.token in stops else self.stream.add(answer.token)
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


def _generate(service: Service, asked: list[_Answer], sampling: Sampling, stops: tuple[int, ...], quiet: bool) -> float:
    """Have all prompts continued and show it: one answer as it comes, several each when it is whole. Returns seconds.

    Raises `RunFailed` when a rank dies.
    """
    from dataclasses import replace

    from shardwise.runtime.job.launch import RunFailed
    from shardwise.serving.messages import Finished

    sampling = replace(sampling, stop_tokens=stops)
    heard: SimpleQueue[Token | Finished] = SimpleQueue()
    started = time.monotonic()
    open_ones = {service.submit(answer.prompt, sampling, heard.put): answer for answer in asked}
    alone = len(asked) == 1
    while open_ones:
        said = heard.get()
        answer = open_ones[said.id]
        if isinstance(said, Finished):
            if said.reason == "error":
                raise RunFailed(said.error)
            del open_ones[said.id]
            _show(answer.end(said) if alone else f"[{asked.index(answer) + 1}] {answer.text}{answer.end(said)}", quiet)
            _show("\n", quiet)
            continue
        answer.first = answer.first or time.monotonic() - started
        ended = answer.stream is not None and answer.stream.stopped
        new = answer.add(said, stops)
        if alone:
            _show(new, quiet)
        if not ended and answer.stream is not None and answer.stream.stopped:
            service.cancel(said.id)
    return time.monotonic() - started


def _show(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, end="", flush=True)


def _progress(words: str) -> None:
    """A line that changes, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def _summary(job: ServingJob, ready: Ready, asked: list[_Answer], seconds: float) -> dict[str, Any]:
    made = sum(len(answer.tokens) for answer in asked)
    return {
        "model": job.model.name,
        "layout": str(job.layout),
        "context": ready.context,
        "parameter_bytes": ready.parameter_bytes,
        "cache_bytes": ready.cache_bytes,
        "transport": ready.transport,
        "load_s": ready.seconds,
        "seconds": seconds,
        "tokens_per_s": made / seconds,
        "answers": [
            {
                "prompt_tokens": len(answer.prompt),
                "reused": answer.finished.reused if answer.finished else 0,
                "tokens": answer.tokens,
                "logprobs": answer.logprobs,
                "text": answer.text if answer.stream else None,
                "reason": answer.reason,
                "first_token_s": answer.first,
            }
            for answer in asked
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
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {out}: {error.strerror}; choose another --report") from None
    try:
        with TemporaryDirectory(prefix="shardwise-notes-") as notes:
            yield notes
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
        print(f"{count} reports, one a turn, lie in {out}", file=sys.stderr)
