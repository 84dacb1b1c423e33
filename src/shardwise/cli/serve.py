"""Serve a model over HTTP with OpenAI's API, split over local processes, one per rank of the layout.

MODEL is a Hugging Face folder, or a checkpoint or run of `shardwise train`, whatever layout it was trained under.
SIGINT, SIGTERM and SIGHUP shut it down gracefully: running requests finish, new ones are rejected.

Under torchrun or srun, on one host or several, the same command runs one rank, and rank 0 answers HTTP: shardwise
launch writes such jobs.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise import __version__
from shardwise.cli.declare import arg, word
from shardwise.cli.engine import ServingOptions, fit_of, job_of
from shardwise.cli.interrupts import ended_as_interrupted
from shardwise.cli.run_file import ConfigOptions
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.runtime.installed import require
from shardwise.runtime.job.output import say
from shardwise.serving.job import Ready, ServingJob, tokenizer_of, weights_in

if TYPE_CHECKING:
    from shardwise.predict.memory.serving import MemoryFit
    from shardwise.serving.http.chat import Chat
    from shardwise.serving.text import Text

KEY = "SHARDWISE_API_KEY"


@dataclass
class ServeOptions(ServingOptions, ConfigOptions):
    title = "the server"
    model: str = word("a folder of weights, with a tokenizer.json", "MODEL")
    host: str = arg("0.0.0.0 for all networks", "ADDRESS", "127.0.0.1")
    port: int = arg("0 for a free one", "N", 8000)
    api_key: str | None = arg(f"what clients must know; better put into {KEY} (none)", "KEY")
    name: str | None = arg("what clients call the model (its folder's name)", "NAME")
    queue: int = arg("sequences that may wait; more are rejected with 429", "N", 256, least=0)
    grace: float = arg("seconds that running requests get to finish after a signal", "S", 30.0, least=0)


def run(args: ServeOptions) -> int:
    require("serving", "starlette", "uvicorn", "jinja2", "tokenizers", "torch", extra="serve")
    from shardwise.runtime.job import rank
    from shardwise.serving.http.app import application
    from shardwise.serving.http.generation import Front
    from shardwise.serving.http.server import bind, is_public, url_of
    from shardwise.serving.http.server import run as run_server
    from shardwise.serving.remote import check_ranks, launched_ranks
    from shardwise.serving.service import Service, become_rank

    key = args.api_key if args.api_key is not None else os.environ.get(KEY) or None
    if key is not None and (not key or key != key.strip() or not key.isascii() or not key.isprintable()):
        raise UserError("an API key has printable ASCII characters, without blanks around them, and at least one")
    name = args.name or Path(args.model).absolute().name
    if launched_ranks() is not None and rank.number():
        become_rank()
    # The server itself ends in order; before that, while weights are read, there is nothing to be finished.
    with bind(args.host, args.port) as sock, ended_as_interrupted():
        job = job_of(args)
        check_ranks(job)
        text, chat = _text_and_chat(args.model)
        fit = fit_of(job)
        for line in fit.lines():
            say(line)
        if not fit.fits:
            raise UserError(fit.refusal())
        say(f"reading weights on {job.layout.ranks} rank(s)")
        with Service(job, joined=launched_ranks() is not None) as service:
            ready = service.start()
            front = Front(service, text, context=job.context, places=job.batch * job.replicas, queue=args.queue)
            public = is_public(sock)
            app = application(front, name, chat, version=__version__, api_key=key, public=public)
            print_ready = partial(_print_ready, f"{url_of(sock)}/v1", name, job, fit, ready, args.json)
            run_server(app, front, sock, grace=args.grace, ready=print_ready, echo=say)
            if launched_ranks() is not None:
                service.drain()
    say("stopped")
    return 0


def _text_and_chat(folder: str) -> tuple[Text, Chat]:
    """The tokenizer of a folder and its chat template. Raises `UserError`."""
    from shardwise.serving.http.chat import Chat
    from shardwise.serving.text import Text

    weights_in(folder)
    file = tokenizer_of(folder)
    if file is None:
        raise UserError(f"{folder} has no tokenizer.json, and a server reads and writes text: put one there")
    return Text.open(folder), Chat(file)


def _print_ready(url: str, name: str, job: ServingJob, fit: MemoryFit, ready: Ready, as_json: bool) -> None:
    """Say that requests are taken: on standard output, since programs wait for that line."""
    import json

    if not as_json:
        print(f"{name} is served on {url}: context {ready.context:,}, {ready.transport}", flush=True)
        return
    said = {
        "url": url,
        "model": name,
        "layout": str(job.layout),
        **keyed(ready, "context pages page_tokens transport load_s=seconds"),
        "held": {**asdict(fit.held), "total": fit.held.total},
        "room": keyed(fit, "bytes=room fits context=largest_context batch=largest_batch"),
        "valid": {"tp": fit.tps, "pp": fit.pps},
    }
    print(json.dumps(said), flush=True)
