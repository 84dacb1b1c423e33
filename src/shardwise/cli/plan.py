"""Find the best layouts to train a model on a cluster: every legal layout that fits memory, fastest first.

For the best layout, plan prints its memory and time by part, what it is bound by, and why not the obvious alternatives.
If no layout fits, it prints what would have to change.

--find searches for something else: the cheapest cluster for a deadline, the largest model of a family, the longest
sequence, the largest batch and micro-batch, or the speedup of more nodes.

--serve finds the best layouts to serve the model, for prompts of --prompt tokens, answers of --output tokens and
--concurrency clients, or --rate requests per second; and how many devices to read prompts with and to decode with,
where these have their own.

Without --cluster, plan prints the smallest number of each device of the catalog that fits, with speed and price. With
several models, a,b,c, it prints one row per model.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from shardwise.cli.clusters import add_cluster, cluster_of, usual_cluster
from shardwise.cli.flags import add_flags
from shardwise.cli.models import add_lora, add_model, subject_of
from shardwise.cli.output import print_result, progress, working
from shardwise.cli.plan_emit import check_emit, emitted, profile_of, refusals
from shardwise.cli.quantities import bytes_of, length_of
from shardwise.cli.workloads import workload_of
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import price_of
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.usual_workload import odd_part
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.predict.cluster_links import link_lines, with_links
from shardwise.report.time_parts import GROUPS, grouped

if TYPE_CHECKING:
    from shardwise.planner.goals import Power, Run, Size, SmallestCandidate
    from shardwise.planner.plan import Plan
    from shardwise.planner.space import Space
    from shardwise.predict.memory.engine_settings import EngineSettings
    from shardwise.predict.time.link_use import LinkUse
    from shardwise.report.terminal import Renderable

FINDS = ("cluster", "model", "sequence", "batch", "scaling")
TOP, MOST_SHOWN = 10, 10_000
MOST = 1e15
"""Largest price, and largest time."""
BY = ("throughput", "fastest", "memory", "cost", "pareto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    add_cluster(parser)
    parser.add_argument("--seq", type=length_of, metavar="N", help="tokens per sequence, such as 8192 or 8k (the "
                        "model's context, up to 8k)")  # fmt: skip
    parser.add_argument("--batch", type=length_of, metavar="N", help="sequences per step, over all devices (0.5M to 4M "
                        "tokens, by the model's size)")  # fmt: skip
    add_flags(parser, Workload, "optimizer")
    add_lora(parser)
    parser.add_argument("--top", type=int, default=TOP, metavar="N", help=f"number of layouts to show ({TOP})")
    parser.add_argument("--by", choices=BY, default="throughput", help="what to rank by (throughput)")
    parser.add_argument("--fix", metavar="KEY=VALUE,...", help="search only layouts with these keys: tp=8,zero=1")
    parser.add_argument("--engine", metavar="PROFILE", help="software whose features and speed are assumed "
                        "(shardwise; tensorrt-llm with --serve)")  # fmt: skip
    parser.add_argument("--precision", metavar="TYPE", help="products of that software: fp8 or mxfp8")
    parser.add_argument("--recompute-layers", metavar="N", type=int, help="blocks of a chunk that it recomputes")
    parser.add_argument("--reserve", metavar="SIZE", help="device memory that training cannot use (2GB)")
    parser.add_argument(
        "--tokens", metavar="N", help="tokens of a whole run, such as 15T; adds days, device-hours and cost"
    )
    parser.add_argument("--price", type=float, metavar="X", help="US dollars per device-hour (the lowest "
                        "recorded list price)")  # fmt: skip
    parser.add_argument("--pue", type=float, metavar="X", help="power usage effectiveness of the data center (1.1)")
    parser.add_argument("--host-watts", type=float, metavar="W", help="host power per device (0)")
    parser.add_argument(
        "--mtbf", type=float, metavar="HOURS", help="mean time between failures of one device; adds goodput"
    )
    parser.add_argument("--save", type=float, metavar="SECONDS", help="pause of the run for a checkpoint, with --mtbf")
    parser.add_argument("--restart", type=float, metavar="SECONDS", help="from a failure until training resumes (0)")
    parser.add_argument("--find", choices=FINDS, help="what to find instead; cluster needs --tokens and --deadline")
    parser.add_argument("--memory", metavar="SIZE", help="with --find model, without MODEL: memory of one device")
    parser.add_argument("--deadline", type=float, metavar="DAYS", help="with --find cluster: longest run")
    parser.add_argument(
        "--links", action="store_true", default=None, help="show communication of the best layout by axis and link"
    )
    parser.add_argument("--emit", metavar="ENGINE", help="write the best layout as this engine's configuration "
                        "(engines: emit --help)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write the plan as JSON, for train --plan; with --emit, its file")
    parser.add_argument("--serve", action="store_true", help="plan serving instead of training")
    parser.add_argument("--prompt", type=length_of, metavar="N", help="with --serve: tokens per prompt")
    parser.add_argument("--output", type=length_of, metavar="N", help="with --serve: tokens per answer")
    parser.add_argument(
        "--concurrency", type=length_of, metavar="N", help="with --serve: clients that each have one request running"
    )
    parser.add_argument("--weights", metavar="FORMAT,...", help="with --serve: formats of the weights, such as bf16, "
                        "fp8, int4-g128z or nvfp4 (all that the engine has)")  # fmt: skip
    parser.add_argument("--kv-cache", metavar="TYPE", help="with --serve: bf16, fp8, or auto: as "
                        "a quantized model's files say, else the engine's own")  # fmt: skip
    parser.add_argument("--rate", type=float, metavar="X",
                        help="with --serve, in place of --concurrency: requests per second")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    check_emit(args)
    if args.model is None or args.memory is not None:
        from shardwise.cli.plan_devices import find_models

        _check_memory(args)
        return find_models(args)
    usual_cluster(args)
    _check_kind(args)
    _check_numbers(args)
    for name in ("precision", "recompute_layers", *SERVED_WITH):
        if getattr(args, name) is not None and (args.cluster is None or "," in args.model):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is for one MODEL on one cluster: give --cluster, or leave it out")
    if "," in args.model:
        from shardwise.cli.plan_models import run as side_by_side
        from shardwise.cli.plan_models import several

        if names := several(args.model):
            return side_by_side(args, names)
    if args.cluster is None:
        from shardwise.cli.plan_devices import run as which_devices

        return which_devices(args)
    if args.serve:
        from shardwise.cli.plan_serving import run as serve

        return serve(args)
    return _train(args)


def _train(args: argparse.Namespace) -> int:
    model, cluster = subject_of(args), cluster_of(args)
    if args.find:
        _check_find(args)
    workload, assumed = workload_of(args, model, odd_part(cluster.devices))
    if args.find == "sequence" and args.seq is None:
        workload, assumed = replace(workload, seq=1), assumed[1:]
    return (_find if args.find else _plan)(args, model, cluster, workload, assumed)


def _check_memory(args: argparse.Namespace) -> None:
    """Raise `UserError` where MODEL is missing for another reason than --find model --memory."""
    if args.memory is not None and (args.model is not None or args.find != "model"):
        raise UserError("--memory is for --find model without MODEL: the models of the catalog that fit one device")
    if args.find != "model":
        raise UserError("plan needs MODEL, a name of `shardwise list models`; only --find model --memory has none")


def _check_numbers(args: argparse.Namespace) -> None:
    if (args.mtbf is None) != (args.save is None):
        raise UserError("--mtbf and --save belong together: how often a device fails, and how long saving takes")
    for name in ("mtbf", "save", "price"):
        if (value := getattr(args, name)) is not None and not 0 < value <= MOST:
            raise UserError(f"--{name} must be a positive number{f' up to {MOST:g}' * (value > MOST)}, not {value:g}")
    if args.restart is not None and (args.mtbf is None or not 0 <= args.restart <= MOST):
        wrong = "needs --mtbf" if args.mtbf is None else f"must not be negative, not {args.restart:g}"
        raise UserError(f"--restart {wrong}")
    if args.top > MOST_SHOWN:
        raise UserError(f"--top shows at most {MOST_SHOWN:,} layouts, not {args.top:,}")
    if (args.deadline is not None) != (args.find == "cluster"):
        raise UserError("--deadline is for --find cluster, which needs it")


TRAINING = (
    "seq", "batch", "fix", "reserve", "tokens", "pue", "host_watts", "mtbf", "save", "restart", "find",
    "deadline", "host_memory", "optimizer", "lora", "links", "precision", "recompute_layers",
)  # fmt: skip
SERVING = ("prompt", "output", "concurrency", "rate")
SERVED_WITH = ("weights", "kv_cache")


def _check_kind(args: argparse.Namespace) -> None:
    """Raise `UserError` for training options with --serve, and for serving options without."""
    others = TRAINING if args.serve else (*SERVING, *SERVED_WITH)
    strange = [name for name in others if getattr(args, name, None) is not None]
    if strange:
        kind = "training: leave it out with --serve" if args.serve else "serving: add --serve"
        raise UserError(f"--{strange[0].replace('_', '-')} belongs to {kind}")
    needed = SERVING[:2] if args.rate is not None else SERVING[:3]
    if missing := [f"--{name}" for name in needed if args.serve and getattr(args, name) is None]:
        other = " (clients) or --rate (requests per second)" if "--concurrency" in missing else ""
        raise UserError(f"plan --serve needs {', '.join(missing)}{other}")
    if args.serve and args.concurrency is not None and args.rate is not None:
        raise UserError(
            "plan --serve takes --concurrency, a number of clients, or --rate, requests per second, not both"
        )
    if args.serve and args.by in ("memory", "fastest"):
        raise UserError(f"--by {args.by} is for training; serving has throughput, cost and pareto")


def _check_find(args: argparse.Namespace) -> None:
    """Reject options that an inverse question does not use."""
    idle = ["mtbf", "save", "links"] + (["tokens", "pue", "host_watts"] if args.find != "cluster" else [])
    named = [name.replace("_", "-") for name in idle if getattr(args, name) is not None]
    named += ["by"] * (args.by != "throughput") + ["top"] * (args.top != TOP)
    if named:
        raise UserError(f"--{named[0]} does nothing with --find {args.find}: leave it out")


def _plan(
    args: argparse.Namespace, model: Model, cluster: Cluster, workload: Workload, assumed: tuple[str, ...]
) -> int:
    fixed = fixed_keys(args)

    from shardwise.planner import plan
    from shardwise.planner.tables import campaign_lines

    chosen = {"engine": profile_of(args), "by": args.by, "top": args.top, "price": args.price}
    chosen |= {
        "settings": settings_of(args),
        "fixed": fixed,
        "reserved": reserved(args),
        "refuses": refusals(args, model),
    }
    with working(f"pricing layouts of {model.name} on {cluster}"):
        best = plan(model, cluster, workload, **chosen)
    campaign = _campaign(args, best)
    file, lines = _written(args, best)
    uses = _links(best) if args.links else ()
    data = (
        best.to_json()
        | {"assumed": list(assumed)}
        | campaign
        | file
        | ({"links": [use.to_json() for use in uses]} if args.links else {})
    )
    notes, priced_lines = (f"assumed: {note}" for note in assumed), campaign_lines(campaign)
    shown = chain(notes, best.tables(), priced_lines)
    if args.links:
        from shardwise.cli.show.link_table import link_tables

        shown = chain(shown, link_tables(uses, best.winner.seconds))
    shown = chain(shown, lines)
    if args.out and not args.emit:
        from shardwise.cli.plan_file import write_plan

        shown = chain(shown, write_plan(args.out, best))
    return print_result(args, data, shown)


def _written(args: argparse.Namespace, best: Plan) -> tuple[dict[str, Any], Iterator[Renderable]]:
    """The file of --emit, and its layout under each engine's profile, for --json and as lines; empty without --emit."""
    if not args.emit:
        return {}, iter(())
    if not isinstance(model := best.model, ModelConfig):
        raise UserError("--emit writes configurations of models that have one; a traced module has split: leave it out")
    from shardwise.cli.show.software_table import software_steps, software_tables
    from shardwise.interop import WriteRequest
    from shardwise.planner.exact import ExactMemory

    memory = ExactMemory(model, best.workload, best.cluster, engine=best.engine, settings=best.settings)
    requests = [WriteRequest(model, one.layout, best.workload, None, best.cluster) for one in best.ranked]
    data, lines = emitted(args, requests, lambda layout: memory.total(layout, best.usable) <= best.usable)
    rows = software_steps(model, Layout.parse(data["emitted"]["layout"]), best.workload, best.cluster)
    return data | {"by_engine": rows}, chain(software_tables(rows, args.emit), lines)


def _links(best: Plan) -> tuple[LinkUse, ...]:
    """Links of the best layout. Raises `UserError` where it cannot be estimated."""
    from shardwise.predict import estimate
    from shardwise.predict.time.link_use import link_uses

    layout = best.winner.layout
    report = estimate(best.model, layout, best.workload, best.cluster)
    return link_uses(best.model, layout, best.cluster, report.roles)


def settings_of(args: argparse.Namespace) -> EngineSettings:
    """Settings of the engine beside its layouts."""
    from shardwise.predict.memory.engine_settings import EngineSettings

    return EngineSettings(args.precision or "", layers=args.recompute_layers or 0)


def fixed_keys(args: argparse.Namespace) -> dict[str, Any]:
    from shardwise.predict.fixing import fixed_of

    return fixed_of(args.fix or "")


def reserved(args: argparse.Namespace) -> float | None:
    return None if args.reserve is None else bytes_of("--reserve", args.reserve)


def _campaign(args: argparse.Namespace, outcome: Plan) -> dict[str, Any]:
    """Duration of a whole run with the winner, and how much of the time failures leave."""
    one = outcome.winner
    reported: dict[str, Any] = {}
    if args.tokens is not None:
        from shardwise.planner.goals import run_of

        tokens, power = tokens_of(args.tokens), _power(args)
        reported["run"] = _told(
            run_of(one, outcome.cluster, outcome.workload, tokens, _price(args, outcome.cluster), power)
        )
    for name in ("pue", "host_watts"):
        if args.tokens is None and getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} needs --tokens: how long the run is")
    if args.mtbf is not None:
        from shardwise.planner.goodput import goodput

        share = goodput(args.mtbf * 3600 / one.layout.ranks, args.save, args.restart or 0.0)
        reported["goodput"] = {"interval_seconds": share.interval, "share": share.share}
    return reported


def _price(args: argparse.Namespace, cluster: Cluster) -> float | None:
    """US dollars per device-hour: --price, else the lowest list price."""
    price = price_of(cluster.device, args.price)
    return price and price.usd


def _power(args: argparse.Namespace) -> Power:
    from shardwise.planner.goals import PUE, Power

    return Power(PUE if args.pue is None else args.pue, args.host_watts or 0.0)


def _told(run: Run) -> dict[str, Any]:
    return {
        "cluster": str(run.cluster),
        "layout": str(run.one.layout),
        "devices": run.one.layout.ranks,
        "steps": run.steps,
        "seconds": run.seconds,
        "device_hours": run.device_hours,
        "cost": run.cost,
        "device": run.cluster.device.name,
        "energy_kwh_at_most": run.energy,
        "pue": run.power.pue,
        "host_watts": run.power.host_watts,
    }


def _find(
    args: argparse.Namespace, model: Model, cluster: Cluster, workload: Workload, assumed: tuple[str, ...]
) -> int:
    from shardwise.planner.runnable import space_for
    from shardwise.planner.tables import answer_lines
    from shardwise.predict.memory.capacity import room_of

    space, _ = space_for(model, cluster, workload, profile_of(args), fixed_keys(args), settings_of(args))
    room = room_of(cluster, space.engine.name, bool(model.experts), reserved(args))
    try:
        answer = _answer(args, space, room.safe)
    finally:
        progress()
    notes = (f"assumed: {note}" for note in assumed)
    data = with_links(answer, cluster) | {"assumed": list(assumed)}
    return print_result(args, data, chain(notes, link_lines(cluster), answer_lines(args.find, answer)))


def _answer(args: argparse.Namespace, space: Space, usable: float) -> dict[str, Any]:
    from shardwise.planner import goals

    if args.find == "cluster":
        if not args.tokens:
            raise UserError("--find cluster needs --tokens: how long the run is, such as 15T")
        if not 0 < args.deadline < float("inf"):
            raise UserError("--deadline must be a positive number of days")
        tokens, deadline = tokens_of(args.tokens), args.deadline * goals.DAY
        run = goals.cheapest_cluster(
            space, usable, tokens, deadline, _price(args, space.cluster), _power(args), progress
        )
        return _told(run) | _refusal(space, run.one.layout)
    if args.find == "model":
        return {"model": goals.largest_model(space, usable).name, "cluster": str(space.cluster)}
    if args.find == "sequence":
        seq, outcome = goals.longest_sequence(space, usable)
        refusal = _refusal(space, outcome.layout, replace(space.workload, seq=seq))
        return {"seq": seq, **_outcome(space, outcome), **refusal}
    if args.find == "batch":
        return _batch(space, usable)
    sizes, ideal, on = goals.scaling(space, usable, progress)
    return {
        "ideal_tokens_per_second_per_device": ideal,
        "ideal_on": str(on),
        "sizes": [_size(space, size) for size in sizes],
    }


def _size(space: Space, size: Size) -> dict[str, Any]:
    if size.best is None:
        empty = ("layout", "seconds", "tokens_per_second", "efficiency", *GROUPS, "not_runnable")
        return {"cluster": str(size.cluster), **dict.fromkeys(empty)}
    return {
        "cluster": str(size.cluster),
        "layout": str(size.best.layout),
        "seconds": size.best.seconds,
        "tokens_per_second": size.tokens_per_second,
        "efficiency": size.efficiency,
        **grouped(size.best.parts),
        **_refusal(space, size.best.layout),
    }


def _outcome(space: Space, outcome: SmallestCandidate) -> dict[str, Any]:
    return {"layout": str(outcome.layout), "bytes": round(outcome.nbytes), "cluster": str(space.cluster)}


def _batch(space: Space, usable: float) -> dict[str, Any]:
    from shardwise.planner import goals

    batch, outcome = goals.largest_batch(space, usable)
    micro = goals.largest_micro(space, usable)
    data = {"batch": batch, **_outcome(space, outcome), "seq": space.workload.seq, "of_batch": space.workload.batch}
    data |= dict.fromkeys(("micro", "micro_layout", "micro_bytes", "micro_not_runnable"))
    if micro is not None:
        data |= {"micro": micro.layout.micro, "micro_layout": str(micro.layout), "micro_bytes": round(micro.nbytes)}
        data["micro_not_runnable"] = _refusal(space, micro.layout)["not_runnable"]
    return data | _refusal(space, outcome.layout, replace(space.workload, batch=batch))


def _refusal(space: Space, layout: Layout, workload: Workload | None = None) -> dict[str, str | None]:
    """Why this project's `train` refuses what was found. workload: where it is not the one that was asked."""
    from shardwise.planner.runnable import why_not_trained

    return {"not_runnable": why_not_trained(layout, space.model, workload or space.workload)}


def tokens_of(text: str) -> float:
    """A number of tokens: 15T, 300B, 1e12. Raises `UserError`."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?(?:e\d{1,2})?)\s*([KMBT]?)\s*", text, re.IGNORECASE)
    tokens = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0.0
    if not 1 <= tokens <= 1e18:
        raise UserError(f"--tokens {text}: give a number of tokens, such as 15T or 300B")
    return tokens
