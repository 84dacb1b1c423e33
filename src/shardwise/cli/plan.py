"""Find the best layouts to train a model on a cluster: every legal layout that fits memory, fastest first.

It prints the best layouts, what binds the first, what was assumed, and the next command. --why adds memory and time by
part and why not the obvious alternatives, --links the links, --all both. If no layout fits, it says what would have to
change.

--find searches for something else: the cheapest cluster for a deadline, the largest model of a family, the longest
sequence, the largest batch and micro-batch, or the speedup of more nodes.

--serve finds the best layouts to serve the model, for prompts of --prompt tokens, answers of --output tokens and
--concurrency clients, or --rate requests per second; with --ttft and --tpot, the best within these times; and how many
devices to read prompts with and to decode with, where these are apart (--disaggregated writes them).

Without --cluster, plan prints the smallest number of each device of the catalog that fits, with speed and price. With
several models, a,b,c, it prints one row per model.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from shardwise.cli.clusters import HostOptions, NetworkOptions, cluster_of, usual_cluster
from shardwise.cli.declare import arg, borrow, leave_out
from shardwise.cli.examples import broken
from shardwise.cli.models import LoraOptions, ModelOptions, model_of, subject_of
from shardwise.cli.output import print_result, progress, working
from shardwise.cli.plan_emit import check_emit, emitted, emitted_apart, profile_for, profile_of, refusals, written_model
from shardwise.cli.quantities import bytes_of, count_of, seconds_of
from shardwise.cli.workloads import workload_of
from shardwise.cluster import Cluster
from shardwise.cluster.catalog import price_of
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.usual_workload import odd_part
from shardwise.model.blueprint_file import configuration
from shardwise.model.parameters import Model
from shardwise.planner.tables import answer_lines, campaign_lines
from shardwise.predict.cluster_links import link_lines, with_links
from shardwise.predict.fixing import fixed_of
from shardwise.predict.memory.capacity import room_of
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.records import dataclass
from shardwise.report.terminal import Renderable
from shardwise.report.time_parts import GROUPS, grouped

if TYPE_CHECKING:
    from shardwise.planner.goals import Power, Run, Size, SmallestCandidate
    from shardwise.planner.plan import Plan
    from shardwise.planner.space import Space
    from shardwise.predict.time.link_use import LinkUse


FINDS = ("cluster", "model", "sequence", "batch", "scaling")
MOST = 1e15
"""Largest price, and largest time."""
By = Literal["throughput", "fastest", "memory", "cost", "pareto"]


@dataclass
class PlanOptions(LoraOptions, HostOptions, NetworkOptions, ModelOptions):
    borrowed = borrow((Workload, "optimizer"))
    seq: int | None = arg(
        "tokens per sequence, such as 8192 or 8k (the model's context, up to 8k)", "N", tokens=True, positive=True
    )
    batch: int | None = arg(
        "sequences per step, over all devices (0.5M to 4M tokens, by the model's size)", "N", tokens=True, positive=True
    )
    top: int | None = arg("number of layouts to show (3; --json: 10)", "N", positive=True, most=10_000)
    by: By = arg("what to rank by", default="throughput")
    fix: str | None = arg("search only layouts with these keys: tp=8,zero=1", "KEY=VALUE,...")
    engine: str | None = arg(
        "software whose features and speed are assumed (shardwise; tensorrt-llm with --serve)", "PROFILE"
    )
    precision: str | None = arg("products of that software: fp8 or mxfp8", "TYPE")
    recompute_layers: int | None = arg("blocks of a chunk that it recomputes", "N")
    reserve: int | None = arg("device memory that training cannot use (2GB)", "SIZE", read=bytes_of)
    tokens: float | None = arg(
        "tokens of a whole run, such as 15T; adds days, device-hours and cost",
        "N",
        read=partial(count_of, "tokens, such as 15T or 300B"),
    )
    price: float | None = arg(
        "US dollars per device-hour (the lowest recorded list price)", "X", positive=True, most=MOST
    )
    pue: float | None = arg("power usage effectiveness of the data center (1.1)", "X")
    host_watts: float | None = arg("host power per device (0)", "W")
    mtbf: float | None = arg(
        "mean time between failures of one device; adds goodput", "HOURS", positive=True, most=MOST, needs="save"
    )
    save: float | None = arg("pause of the run for a checkpoint", "SECONDS", positive=True, most=MOST, needs="mtbf")
    restart: float | None = arg("from a failure until training resumes (0)", "SECONDS", least=0, needs="mtbf")
    find: str | None = arg(
        "what to find instead; cluster needs --tokens and --deadline",
        choices=FINDS,
        excludes="mtbf save why links all by top emit",
    )
    memory: int | None = arg("with --find model, without MODEL: memory of one device", "SIZE", read=bytes_of)
    deadline: float | None = arg("with --find cluster: longest run", "DAYS", positive=True)
    why: bool = arg("show memory and time of the best by part, and why not another")
    links: bool = arg("show communication of the best layout by axis and link")
    all: bool = arg("show ten layouts, and all that --why and --links show")
    emit: str | None = arg(
        "write the best layout as this engine's configuration (engines: emit --help)", "ENGINE", excludes="lora"
    )
    disaggregated: bool = arg(
        "with --emit vllm or sglang: write instances for prefill and for decoding on devices apart", needs="serve emit"
    )
    out: str | None = arg("write the plan as JSON, for train --plan; with --emit, its file", "FILE")
    serve: bool = arg(
        "plan serving instead of training",
        excludes="seq batch fix reserve tokens pue host_watts mtbf save restart find deadline host_memory optimizer "
        "lora links precision recompute_layers",
        idle="belongs to training: leave it out with --serve",
        missing="belongs to serving: add --serve",
    )
    prompt: int | None = arg("tokens per prompt (1024)", "N", tokens=True, needs="serve")
    output: int | None = arg("tokens per answer (256)", "N", tokens=True, needs="serve")
    concurrency: int | None = arg(
        "clients with one request running (64; with --ttft or --tpot, as many as these allow)",
        "N",
        tokens=True,
        needs="serve",
    )
    ttft: float | None = arg(
        "longest mean time to the first token, such as 200ms", "TIME", needs="serve", read=seconds_of
    )
    tpot: float | None = arg("longest mean time per token after it", "TIME", needs="serve", read=seconds_of)
    weights: str | None = arg(
        "formats of the weights, such as bf16, fp8, int4-g128z or nvfp4 (all that the engine has)",
        "FORMAT,...",
        needs="serve",
    )
    kv_cache: str | None = arg(
        "bf16, fp8, or auto: as a quantized model's files say, else the engine's own", "TYPE", needs="serve"
    )
    rate: float | None = arg(
        "requests per second, in place of --concurrency", "X", needs="serve", excludes="concurrency"
    )


def run(args: PlanOptions) -> int:
    usual_cluster(args)
    check_emit(args)
    if args.model is None or args.memory is not None:
        from shardwise.cli.plan_devices import find_models

        return find_models(args)
    _check(args)
    if args.cluster is None or "," in args.model:
        message = "is for one MODEL on one cluster: give --cluster, or leave it out"
        leave_out(args, "precision recompute_layers weights kv_cache", message)
    if "," in args.model:
        from shardwise.cli.plan_models import run as side_by_side
        from shardwise.cli.plan_models import several

        if names := several(args.model):
            return side_by_side(args, names)
    if args.cluster is None:
        from shardwise.cli.plan_devices import run as which_devices

        return which_devices(args)
    if args.serve:
        return _serve(args)
    model, cluster = subject_of(args), cluster_of(args)
    workload, assumed = workload_of(args, model, odd_part(cluster.devices))
    if args.find == "sequence" and args.seq is None:
        workload, assumed = replace(workload, seq=1), assumed[1:]
    return (_find if args.find else _plan)(args, model, cluster, workload, assumed)


def _check(args: PlanOptions) -> None:
    """Raise `UserError` for options of a deployment that are missing, or that its goal does not use."""
    if args.serve and args.by in ("memory", "fastest"):
        raise UserError(f"--by {args.by} is for training; serving has throughput, cost and pareto")
    if args.find == "cluster" and None in (args.deadline, args.tokens):
        missing = "--tokens N: how long the run is, such as 15T" if args.deadline else "--deadline DAYS, and --tokens N"
        raise UserError(f"--find cluster needs {missing}")
    if args.deadline is not None and args.find != "cluster":
        raise UserError("--deadline is for --find cluster")
    if args.find and args.find != "cluster":
        leave_out(args, "tokens pue host_watts", f"does nothing with --find {args.find}: leave it out")
    if args.tokens is None:
        leave_out(args, "pue host_watts", "needs --tokens: how long the run is")


def _serve(args: PlanOptions) -> int:
    from shardwise.interop import ServerSettings, WriteRequest
    from shardwise.interop.reading.settings import PREFILL_TOKENS
    from shardwise.planner.serving import plan_serving

    model, cluster = model_of(args), cluster_of(args)
    with working(f"pricing deployments of {model.name} on {cluster}"):
        result = plan_serving(
            model, cluster, prompt=args.prompt, output=args.output, concurrency=args.concurrency,
            engine=profile_of(args), top=args.top, price=args.price, rate=args.rate, ttft=args.ttft, tpot=args.tpot,
            by=args.by,  # type: ignore[arg-type]
            weights=(args.weights or "").replace(" ", "").split(",") if args.weights else (),
            kv_cache=args.kv_cache or "auto",
        )  # fmt: skip
    if args.all and args.top is None:
        result = replace(result, shown=len(result.ranked))
    length, requests = result.workload.prompt + result.workload.output, []
    for one in result.ranked:
        weights = result.words(one.weights)
        served = ServerSettings(weights, one.cache, length, one.batch, PREFILL_TOKENS, result.share)
        requests.append(WriteRequest(result.model, one.layout, served=served, cluster=result.cluster))
    file, lines = emitted_apart(args, result.apart, requests) if args.disaggregated else emitted(args, requests)
    why = result.why() if args.why or args.all else ()
    follows = () if args.emit else ["next: --emit vllm or --emit sglang for their flags; more: --why, --all"]
    return print_result(args, result.to_json() | file, chain(result.tables(), why, lines, follows))


def _plan(args: PlanOptions, model: Model, cluster: Cluster, workload: Workload, assumed: tuple[str, ...]) -> int:
    fixed = fixed_of(args.fix or "")  # before numpy is loaded: a typo is answered fast

    from shardwise.planner import plan

    chosen: dict[str, Any] = {
        "engine": profile_for(args, model), "by": args.by, "top": args.top, "price": args.price, "assumed": assumed,
        "settings": settings_of(args), "fix": fixed, "reserve": args.reserve,
        "refuses": refusals(args, model, cluster, workload),
    }  # fmt: skip
    with working(f"pricing layouts of {model.name} on {cluster}"):
        best = plan(model, cluster, workload, **chosen)
    campaign = _campaign(args, best)
    file, lines = _written(args, best)
    uses = _links(best) if args.links or (args.all and best.cluster.devices > 1) else ()
    if args.all and args.top is None:
        best = replace(best, shown=len(best.ranked))
    data = best.to_json() | campaign | file | ({"links": [use.to_json() for use in uses]} if uses else {})
    shown = chain(best.tables(), campaign_lines(campaign), best.why() if args.why or args.all else ())
    if uses:
        from shardwise.cli.show.link_table import link_tables

        shown = chain(shown, link_tables(uses, best.winner.seconds))
    if args.out and not args.emit:
        from shardwise.cli.plan_file import write_plan

        lines = iter(write_plan(args.out, best))
    elif not args.emit:
        lines = next_lines(args, best)
    return print_result(args, data, chain(shown, lines))


def _written(args: PlanOptions, best: Plan) -> tuple[dict[str, Any], Iterator[Renderable]]:
    """The file of --emit, and its layout under each engine's profile, for --json and as lines; empty without --emit."""
    if not args.emit:
        return {}, iter(())
    from shardwise.cli.show.software_table import software_steps, software_tables
    from shardwise.interop import WriteRequest

    model = written_model(args, best.model)
    requests = [WriteRequest(model, one.layout, best.workload, None, best.cluster) for one in best.ranked]
    data, lines = emitted(args, requests)
    rows = software_steps(model, Layout.parse(data["emitted"]["layout"]), best.workload, best.cluster)
    table = software_tables(rows, args.emit) if args.why or args.all else ()
    return data | {"by_engine": rows}, chain(table, lines)


def _links(best: Plan) -> tuple[LinkUse, ...]:
    """Links of the best layout. Raises `UserError` where it cannot be estimated."""
    from shardwise.predict import estimate
    from shardwise.predict.time.link_use import link_uses

    layout = best.winner.layout
    report = estimate(best.model, layout, best.workload, best.cluster)
    return link_uses(best.model, layout, best.cluster, report.roles)


def settings_of(args: PlanOptions) -> EngineSettings:
    """Settings of the engine beside its layouts."""
    return EngineSettings(args.precision or "", layers=args.recompute_layers or 0)


def _campaign(args: PlanOptions, outcome: Plan) -> dict[str, Any]:
    """Duration of a whole run with the winner, and how much of the time failures leave."""
    one = outcome.winner
    reported: dict[str, Any] = {}
    if args.tokens is not None:
        from shardwise.planner.goals import run_of

        reported["run"] = _told(
            run_of(one, outcome.cluster, outcome.workload, args.tokens, _price(args, outcome.cluster), _power(args))
        )
    if args.mtbf is not None and args.save is not None:
        from shardwise.planner.goodput import goodput

        share = goodput(args.mtbf * 3600 / one.layout.ranks, args.save, args.restart or 0.0)
        reported["goodput"] = {"interval_seconds": share.interval, "share": share.share}
    return reported


def _price(args: PlanOptions, cluster: Cluster) -> float | None:
    """US dollars per device-hour: --price, else the lowest list price."""
    price = price_of(cluster.device, args.price)
    return price and price.usd


def _power(args: PlanOptions) -> Power:
    from shardwise.planner.goals import PUE, Power

    return Power(PUE if args.pue is None else args.pue, args.host_watts or 0.0)


def _told(run: Run) -> dict[str, Any]:
    keys = (
        "cluster layout=one.layout devices=one.layout.ranks steps seconds device_hours cost device=cluster.device.name"
    )
    return keyed(run, f"{keys} energy_kwh_at_most=energy pue=power.pue host_watts=power.host_watts")


def _find(args: PlanOptions, model: Model, cluster: Cluster, workload: Workload, assumed: tuple[str, ...]) -> int:
    from shardwise.planner.runnable import space_for

    space, _ = space_for(
        model, cluster, workload, profile_for(args, model), fixed_of(args.fix or ""), settings_of(args)
    )
    room = room_of(cluster, space.engine.name, bool(model.experts), args.reserve)
    try:
        answer = _answer(args, space, room.safe)
    finally:
        progress()
    notes = (f"assumed: {note}" for note in assumed)
    data = with_links(answer, cluster) | {"assumed": list(assumed)}
    return print_result(args, data, chain(notes, link_lines(cluster), answer_lines(args.find or "", answer)))


def _answer(args: PlanOptions, space: Space, usable: float) -> dict[str, Any]:
    from shardwise.planner import goals

    if args.tokens is not None and args.deadline is not None:
        run = goals.cheapest_cluster(
            space, usable, args.tokens, args.deadline * goals.DAY, _price(args, space.cluster), _power(args), progress
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
        **keyed(size, "cluster layout=best.layout seconds=best.seconds tokens_per_second efficiency"),
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


def next_lines(args: Any, best: Plan) -> Iterator[str]:
    """The command that runs the best layout, and the options that show more."""
    more = "more: --why, --links, --all"
    if best.model.trace and configuration(best.model) is None:
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
