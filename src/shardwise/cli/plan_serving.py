"""`plan --serve`."""

from __future__ import annotations

from itertools import chain
from typing import Any

from shardwise.cli.clusters import cluster_of
from shardwise.cli.models import model_of
from shardwise.cli.output import print_result, working
from shardwise.cli.plan_emit import emitted, profile_of
from shardwise.interop import ServerSettings, WriteRequest
from shardwise.interop.reading.settings import PREFILL_TOKENS
from shardwise.layout import Workload
from shardwise.planner.serving import Deployment, ServingPlan, plan_serving


def run(args: Any) -> int:
    """Plan serving as `args` asks. Raises `UserError`."""
    clients = 1 if args.concurrency is None else args.concurrency
    workload = Workload(prompt=args.prompt, output=args.output, concurrency=clients)
    model, cluster = model_of(args), cluster_of(args)
    with working(f"pricing deployments of {model.name} on {cluster}"):
        result = plan_serving(
            model, cluster, workload, engine=profile_of(args), by=args.by, top=args.top, price=args.price,
            rate=args.rate, weights=(args.weights or "").replace(" ", "").split(",") if args.weights else (),
            kv_cache=args.kv_cache or "auto",
        )  # fmt: skip
    file, lines = emitted(args, [_request(result, one) for one in result.ranked])
    return print_result(args, result.to_json() | file, chain(result.tables(), lines))


def _request(plan: ServingPlan, one: Deployment) -> WriteRequest:
    work = plan.workload
    served = ServerSettings(
        weights=plan.words(one.weights),
        cache=one.cache,
        length=work.prompt + work.output,
        sequences=one.batch,
        tokens=PREFILL_TOKENS,
        memory=plan.share,
    )
    return WriteRequest(plan.model, one.layout, served=served, cluster=plan.cluster)
