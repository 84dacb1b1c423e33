"""The command that follows a plan, with its model, layout and workload: as it can be typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.cli.examples import broken
from shardwise.model import ModelConfig

if TYPE_CHECKING:
    from shardwise.planner.plan import Plan


def next_lines(args: Any, best: Plan) -> Iterator[str]:
    """The command that runs the best layout, and the options that show more."""
    more = "more: --why, --links, --all"
    if not isinstance(best.model, ModelConfig):
        yield f"next: split(module, {str(best.winner.layout)!r}) in Python; {more}"
    elif best.none_runs or best.not_runnable(best.winner):
        yield f"next: --emit ENGINE for the flags of an engine that runs it; {more}"
    else:
        yield f"next (or --emit ENGINE for another engine's flags; {more})"
        yield broken(command(args, best))


def command(args: Any, best: Plan) -> str:
    """`train` of the best layout, in a job where there are several nodes."""
    work, layout = best.workload, str(best.winner.layout)
    words = ["train", args.model, "--layout", layout, "--seq", str(work.seq), "--batch", str(work.batch)]
    words += [word for text in args.set for word in ("--set", text)] + (["--lora", args.lora] if args.lora else [])
    words += ["--data", "TEXT"]
    if best.cluster.nodes == 1:
        words += ["--device", "cuda"] if best.cluster.device.kind == "cuda" else []
    else:
        out = ["--out", f"runs/{best.model.name.rsplit('/', 1)[-1]}"]
        words = ["launch", "--slurm", "--cluster", args.cluster, "--", *words, *out]
    return shlex.join(["shardwise", *words])
