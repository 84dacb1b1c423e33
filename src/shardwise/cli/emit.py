"""A layout as the configuration of another engine: a file, or a script with the command.

Training engines take --seq and --batch (where they are left out, usual ones, as in plan), servers (vllm and sglang)
--prompt, --output and --concurrency. What an engine cannot express is an error with the nearest layout that it can;
what its files leave to your code is a comment. `shardwise explain` reads the file back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.cli.clusters import add_cluster, cluster_of
from shardwise.cli.flags import add_flags, given
from shardwise.cli.models import add_offline
from shardwise.cli.output import print_json
from shardwise.cli.plan_emit import source_of
from shardwise.cli.quantities import length_of
from shardwise.cli.workloads import workload_of
from shardwise.errors import UserError, os_errors
from shardwise.interop import EngineFile, ServerSettings, WriteRequest, write
from shardwise.interop.reading.settings import PREFILL_TOKENS
from shardwise.interop.writing.writer import writer_for
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import resolve
from shardwise.model.changes import change

SERVING = ("prompt", "output", "concurrency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name of the catalog, a config.json, or its folder")
    parser.add_argument("--layout", metavar="TEXT", help="how the model is split, such as tp=8,dp=8,zero=1")
    parser.add_argument("--model", dest="former", help=argparse.SUPPRESS)
    parser.add_argument("--set", metavar="FIELD=VALUE,...", action="append", default=[], help="change the model")
    add_offline(parser)
    parser.add_argument("--for", dest="engine", metavar="ENGINE", required=True, help="the engine: megatron, "
                        "torchtitan, deepspeed, accelerate, transformers, torchrun, vllm or sglang")  # fmt: skip
    parser.add_argument("--engine-version", metavar="V", default="", help="version of the engine, where names changed")
    add_cluster(parser, network=False)
    add_flags(parser, Workload, "seq", "batch", "optimizer")
    parser.add_argument("--prompt", type=length_of, metavar="N", help="servers: tokens of a prompt")
    parser.add_argument("--output", type=length_of, metavar="N", help="servers: tokens of an answer")
    parser.add_argument("--concurrency", type=int, metavar="N", help="servers: clients at the same time")
    parser.add_argument("--weights", metavar="NAME", help="the model's folder or hub name, as the engine loads it")
    parser.add_argument("--out", metavar="FILE", help="write the file here instead of to standard output")


def run(args: argparse.Namespace) -> int:
    if args.former is not None:
        # The former order, emit LAYOUT --model MODEL.
        args.model, args.layout = args.former, args.model
    if args.layout is None:
        raise UserError("emit needs --layout, such as tp=8,dp=8,zero=1; plan --emit finds one")
    for name in ("seq", "batch", *SERVING):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} must be a positive integer")
    writer = writer_for(args.engine)
    if args.set and writer.loads_model:
        raise UserError(f"{writer.title} loads the model by its name, which --set changes: give a folder with it")
    model, layout = change(resolve(args.model), ",".join(args.set)), Layout.parse(args.layout)
    workload, assumed = Workload(**given(args, Workload)), tuple[str, ...]()
    if not writer.serves and all(getattr(args, name) is None for name in SERVING):
        workload, assumed = workload_of(args, model, layout.dp * layout.micro)
    request = WriteRequest(
        model,
        layout,
        workload,
        _served_of(args, writer.serves),
        cluster_of(args) if args.cluster else None,
        args.weights or source_of(args.model),
        args.engine_version,
        tuple(f"assumed {note}" for note in assumed),
    )
    file = write(args.engine, request)
    return _show_file(args, file)


def _served_of(args: argparse.Namespace, serves: bool) -> ServerSettings | None:
    """A server's numbers; None for training. Raises `UserError` for one of the three without the others."""
    missing = [f"--{name}" for name in SERVING if getattr(args, name) is None]
    if len(missing) == len(SERVING):
        return ServerSettings() if serves else None
    if missing:
        raise UserError(f"a server needs {', '.join(missing)}, too")
    # Each replica takes its share of the clients.
    share = -(-args.concurrency // Layout.parse(args.layout).dp)
    return ServerSettings(length=args.prompt + args.output, sequences=share, tokens=PREFILL_TOKENS)


def _show_file(args: argparse.Namespace, file: EngineFile) -> int:
    """Print the file, or write it to --out; with --json all about it."""
    if args.out:
        with os_errors(f"write {args.out}"):
            Path(args.out).write_text(file.text, encoding="utf-8")
    if args.json:
        print_json(file.to_json() | {"out": args.out})
    elif args.out:
        print(f"{args.out}: {file.layout} for {file.layout.ranks} ranks")
        for line in file.comments:
            print(f"  {line}")
    else:
        print(file.text, end="")
    return 0
