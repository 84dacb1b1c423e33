"""`measure_step`: time of a layout's step from one rank's real share on the device at hand, and the network model.

Ranks without a pipeline: as many shares as the real run has ranks on this host run at once, each with the waits that
the network model predicts; where their collectives meet, the slower one counts. A pipeline: every kind of rank runs its
own computations, and the schedule's simulation (`schedule.pipeline.simulate`) composes the step from their times.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cluster.catalog import machine_memory
from shardwise.emulate.share_composition import WaitSum, differences, meeting, parts_of, pipelined, waits_of
from shardwise.emulate.share_job import Share, ShareJob
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, check_runnable
from shardwise.layout.axes import PP
from shardwise.layout.unit import Backend
from shardwise.layout.units import UnitPlan, unit_plan
from shardwise.model import ModelConfig
from shardwise.predict.time import Pricing
from shardwise.predict.time.link_use import named
from shardwise.predict.time.network import MEASURED, Collectives
from shardwise.report.step_report import LedgerRow, StepReport
from shardwise.report.units import format_bytes
from shardwise.runtime.dryrun import kind_of_work
from shardwise.runtime.measure.job import whole

SIZES = (2.0 ** np.arange(8, 41, 0.5)).tolist()
"""Bytes at which a price is given: the network model's own samples, and one between each two."""
MESSAGE = "recv"


def collectives_of(cluster: Cluster, layout: Layout) -> Collectives:
    """The network model of a cluster. Raises `UserError` where it has no numbers, with the command that measures
    them."""
    try:
        return Pricing(cluster, layout=layout).collectives
    except UserError as error:
        if cluster.device.kind == "cpu" and not cluster.device.measured:
            raise UserError(
                "--measure needs the speed of this machine's collectives: run `shardwise calibrate device --ranks "
                f"{cluster.devices_per_node} --out FILE.toml` and give --cluster FILE.toml"
            ) from None
        raise error from None


def price_rows(
    collectives: Collectives, mesh: Mesh, rank: int, ledger: Iterable[LedgerRow]
) -> list[tuple[str, list[int], list[float]]]:
    """(operation, ranks of the group, seconds at each of `SIZES`) for every group in a rank's ledger.

    Messages between the stages of a pipeline take no time here: the simulation of the schedule has them.
    """
    rows = []
    for axis in sorted({row.axes for row in ledger}):
        group = mesh.group(named(axis), rank)
        stride = stride_of(group)
        for op in MEASURED:
            name = "all_gather_into" if op == "all_gather" else op
            rows.append((name, list(group), _numbers(collectives.seconds(name, np.array(SIZES), len(group), stride))))
        hop = 0.0 * np.array(SIZES) if named(axis) == PP else collectives.hop(np.array(SIZES), stride)
        rows.append((MESSAGE, list(group), _numbers(hop)))
    return rows


def stride_of(group: tuple[int, ...]) -> int:
    """Distance of neighbors in a group; of an uneven one, the mean, rounded up."""
    ordered = sorted(group)
    return -(-(ordered[-1] - ordered[0]) // (len(ordered) - 1))


def message_seconds(collectives: Collectives, mesh: Mesh, ledger: Iterable[LedgerRow]) -> tuple[float, float]:
    """Seconds of the largest message between two stages, and of the tied table's gradients."""
    seconds = {False: 0.0, True: 0.0}
    stride = stride_of(mesh.group(PP, 0))
    for row in ledger:
        if row.op == "send" and named(row.axes) == PP:
            tied = row.unit == "tied"
            once = float(collectives.hop(row.payload_bytes / row.count, stride))
            seconds[tied] = max(seconds[tied], once)
    return seconds[False], seconds[True]


def _numbers(array: Any) -> list[float]:
    return [float(seconds) for seconds in array]


WARM, REPEATS = 2, 5
PROCESS_BYTES = 0.5e9
"""Memory of a process with torch before it holds anything."""
_TIMEOUT = 600.0


@dataclass(frozen=True)
class MeasuredStep:
    """Time of a step, composed of measured arithmetic and predicted waits."""

    seconds: float
    """The median of `repeats`."""
    repeats: tuple[float, ...]
    parts: dict[str, float]
    """Seconds of arithmetic by part of the step, of the share that computes longest."""
    waits: tuple[WaitSum, ...]
    """Its waits for collectives."""
    others: float
    """Seconds for which it waits for other ranks: the bubble of a pipeline, or the slower ones where they meet."""
    device: str
    ranks: tuple[int, ...]
    """Ranks of the layout whose shares ran."""
    processes: int
    """Shares that ran at once."""
    warm: int
    """Warm-up steps."""
    ledger_differs: tuple[str, ...]
    """Rows of the recorded ledger that the prediction does not have, or the other way round."""
    notes: tuple[str, ...]
    """What was not measured."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"low": min(self.repeats), "high": max(self.repeats)}


@dataclass(frozen=True)
class ShareSettings:
    """Settings of a measurement. device: "cpu" or "cuda"; backend: of the real run's collectives; name: of the device,
    where the processes do not know better."""

    device: str
    backend: Backend
    name: str
    warm: int = WARM
    repeats: int = REPEATS


@dataclass(frozen=True)
class SharePlan:
    """Shares to run, and the composition of a step from what they took."""

    model: ModelConfig
    layout: Layout
    workload: Workload
    cluster: Cluster
    settings: ShareSettings
    ledgers: Mapping[int, Sequence[LedgerRow]]
    """Predicted ledger of each rank."""
    rounds: tuple[tuple[int, ...], ...]
    """Ranks of the layout whose shares run at once."""

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.layout, self.model)

    @cached_property
    def places(self) -> list[UnitPlan]:
        """Plan of the first rank at each place of the pipeline."""
        return places(self.model, self.layout, self.workload, self.settings.backend)

    @cached_property
    def collectives(self) -> Collectives:
        return collectives_of(self.cluster, self.layout)

    @cached_property
    def message(self) -> tuple[float, float]:
        """Seconds of a message between two stages of a pipeline, and of the tied table's gradients."""
        return message_seconds(self.collectives, self.mesh, self.ledgers[0]) if self.layout.pp > 1 else (0.0, 0.0)

    @property
    def on_host(self) -> int:
        return min(self.layout.ranks, self.cluster.devices_per_node)

    @property
    def background(self) -> bool:
        """Whether collectives continue while a rank computes: gloo's threads need cores that no rank computes on."""
        spare = cores() > self.on_host
        return self.settings.device == "cuda" or (self.settings.backend == "gloo" and spare)

    def job(self, ranks: Sequence[int], out: str) -> ShareJob:
        """The job of processes that play these ranks. out: file for what they find."""
        priced = [
            row
            for rank in sorted(set(ranks))
            if self.ledgers[rank]  # one rank alone needs no network
            for row in price_rows(self.collectives, self.mesh, rank, self.ledgers[rank])
        ]
        settings = self.settings
        return ShareJob(
            model=self.model.to_json(), layout=str(self.layout), workload=self.workload.to_json(),
            backend=settings.backend, device=settings.device, ranks=list(ranks), sizes=SIZES, prices=priced,
            message=self.message, background=self.background, warm=settings.warm, repeats=settings.repeats,
            timeout=_TIMEOUT, out=out,
        )  # fmt: skip

    def composed(self, shares: Mapping[int, Share], device: str = "") -> MeasuredStep:
        """The step, from the share of each rank that ran. device: its name, as the processes have it."""
        seconds = self._seconds(shares)
        busiest = max(shares.values(), key=lambda share: fmean(sum(step.parts.values()) for step in share.steps))
        parts, waits = parts_of(busiest), waits_of(busiest)
        others = median(seconds) - sum(parts.values()) - sum(wait.waited for wait in waits)
        return MeasuredStep(
            median(seconds), seconds, parts, waits, max(others, 0.0), device or self.settings.name,
            tuple(sorted(shares)), len(self.rounds[0]), self.settings.warm,
            differences(shares.values(), self.ledgers, bool(self.model.experts)), _notes(self),
        )  # fmt: skip

    def _seconds(self, shares: Mapping[int, Share]) -> tuple[float, ...]:
        repeats = range(min(len(share.steps) for share in shares.values()))
        if self.layout.pp == 1:
            return tuple(meeting([share.steps[i] for share in shares.values()]) for i in repeats)
        overlap = self.settings.device == "cuda"
        return tuple(pipelined(self.places, self.mesh, shares, i, self.message, overlap) for i in repeats)


def plan_shares(
    model: ModelConfig,
    layout: Layout,
    workload: Workload,
    cluster: Cluster,
    report: StepReport,
    settings: ShareSettings,
) -> SharePlan:  # fmt: skip
    """The shares that measure a layout. report: its prediction with the backend of `settings`.

    Raises `UserError` for a layout that cannot run in shares, a share that does not fit this machine, and a cluster
    whose collectives have no price.
    """
    check_measurable(layout, model, workload, cluster)
    on_host = min(layout.ranks, cluster.devices_per_node)
    processes = 1 if settings.device == "cuda" else min(on_host, cores())
    rounds = _rounds(places(model, layout, workload, settings.backend), Mesh.of(layout, model), processes)
    check_memory(report, rounds, settings.device)
    ledgers = {rank: role.ledger for role in report.roles for rank in role.ranks}
    if any(ledgers.values()):
        collectives_of(cluster, layout)
    return SharePlan(model, layout, workload, cluster, settings, ledgers, rounds)


def measure_step(
    model: ModelConfig,
    layout: Layout,
    workload: Workload,
    cluster: Cluster,
    report: StepReport,
    settings: ShareSettings,
) -> MeasuredStep:  # fmt: skip
    """Run the shares and compose the step. Arguments and errors as for `plan_shares`; `RunFailed` when a process
    dies."""
    plan = plan_shares(model, layout, workload, cluster, report, settings)
    shares: dict[int, Share] = {}
    device = ""
    for ranks in plan.rounds:
        found = whole("shardwise.emulate.share", lambda out, ranks=ranks: asdict(plan.job(ranks, out)), len(ranks))  # type: ignore[misc]
        device = found["device"]
        for share in map(Share.from_json, found["shares"]):
            shares.setdefault(share.rank, share)
    return plan.composed(shares, device)


def places(model: ModelConfig, layout: Layout, workload: Workload, backend: Backend) -> list[UnitPlan]:
    """Plan of the first rank at each place of the pipeline."""
    mesh = Mesh.of(layout, model)
    return [unit_plan(model, layout, workload, rank=mesh.rank(pp=at), backend=backend) for at in range(layout.pp)]


def cores() -> int:
    return len(os.sched_getaffinity(0))


def check_measurable(layout: Layout, model: ModelConfig, workload: Workload, cluster: Cluster) -> None:
    """Raise `UserError` for what does not run in shares."""
    check_runnable(layout, model, workload, cluster.devices)
    if layout.sync != "allreduce":
        raise UserError(f"--measure runs ranks that make every step together, not sync={layout.sync}: leave it out")
    if layout.algorithm != "auto":
        raise UserError(
            f"--measure replaces collectives by waits, so algorithm={layout.algorithm} cannot run: leave it out"
        )
    if layout.uses_disk:
        raise UserError("--measure does not write state to disk: choose offload=cpu in place of nvme")


def check_memory(report: StepReport, rounds: Sequence[Sequence[int]], device: str) -> None:
    """Raise `UserError` where the shares of a round do not fit this machine's memory, or the device's."""
    peaks = {rank: (role.peak_bytes, role.host.total) for role in report.roles for rank in role.ranks}
    if device == "cuda":
        import torch

        free: float = torch.cuda.mem_get_info(0)[0]
        need = max(float(peaks[rank][0]) for ranks in rounds for rank in ranks)
        where = "free on the device at hand"
    else:
        free = machine_memory() or 0
        need = max(sum(sum(peaks[rank]) + PROCESS_BYTES for rank in ranks) for ranks in rounds)
        where = "in this machine's memory"
    if free and need > free:
        count = len(rounds[0])
        words = f"{count} shares of this layout need" if count > 1 else "a share of this layout needs"
        raise UserError(
            f"--measure: {words} {format_bytes(need)}, and {format_bytes(free)} are {where}: choose a smaller "
            "micro-batch, recompute=full or a finer split"
        )


def _rounds(plans: Sequence[UnitPlan], mesh: Mesh, processes: int) -> tuple[tuple[int, ...], ...]:
    """Ranks that run at once. Of a pipeline each kind of work once, and more of them as load up to `processes`."""
    if len(plans) == 1:
        return (tuple(range(processes)),)
    kinds: dict[str, int] = {}
    for place, plan in enumerate(plans):
        kinds.setdefault(kind_of_work(plan), mesh.rank(pp=place))
    ranks = list(kinds.values())
    rounds = [ranks[start : start + processes] for start in range(0, len(ranks), processes)]
    return tuple(tuple((of_round * processes)[:processes]) for of_round in rounds)


def _notes(plan: SharePlan) -> tuple[str, ...]:
    """What was not measured, a sentence each."""
    layout, model, on_host, at_once = plan.layout, plan.model, plan.on_host, len(plan.rounds[0])
    network = "not measured: the network; its waits are predicted from the cluster's numbers"
    notes = [network] if layout.ranks > 1 else []
    if (
        plan.settings.backend == "gloo"
        and plan.cluster.nodes == 1
        and "--transport gloo" not in plan.cluster.device.source
    ):
        notes.append("the cluster's collectives were not calibrated over gloo (calibrate device --transport gloo)")
    if layout.pp > 1:
        notes.append(
            "not measured: messages between stages; the schedule's simulation composed the step from the stages' times"
        )
    if plan.settings.device == "cpu" and on_host > 1:
        if at_once < on_host:
            notes.append(
                f"not measured: {on_host} ranks on one host; on {cores()} cores {at_once} shares ran at once, without "
                "the others' load on memory"
            )
        if not plan.background:
            notes.append("collectives hide behind nothing: the ranks' own cores do their work")
    if layout.ranks > at_once and layout.pp == 1 and (layout.cp > 1 or model.experts):
        notes.append("not measured: ranks with a larger part of attention or of experts than the measured ones")
    if model.experts:
        notes.append(
            "routing to experts is that of a fresh model on random tokens, and each rank gets as many rows as it sends"
        )
    return tuple(notes)
