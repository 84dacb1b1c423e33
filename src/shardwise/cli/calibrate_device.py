"""`shardwise calibrate device`: what the device at hand takes for the operations of a step, into a cluster file.

The file is the one that `calibrate network` writes: whichever comes second brings it up to date.
"""

from __future__ import annotations

import platform
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.cli import collective_bench
from shardwise.cli.clusters import known_cluster, write_cluster
from shardwise.cli.declare import CommandOptions, arg
from shardwise.cli.output import print_json, show
from shardwise.cluster import Cluster, Device, Host, Link
from shardwise.cluster.catalog import lookup, machine_memory
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.report.table import plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.runtime import TRANSPORTS
from shardwise.runtime.installed import require
from shardwise.runtime.measure.samples import Probed, above_limits

if TYPE_CHECKING:
    from shardwise.runtime.measure.hardware import DiskRates


@dataclass
class DeviceOptions(CommandOptions):
    """Time products, attention, memory and collectives on this host's CPU or GPU."""

    ranks: int = arg("CPU processes that measure at once", "P", 1)
    device: str = arg("(auto: cuda if there is one)", default="auto", choices=("auto", "cpu", "cuda"), shown="")
    threads: int = arg("of each rank's matrix products", "N", 1, positive=True)
    transport: str = arg("of ranks, as in train", default="auto", choices=TRANSPORTS, shown="")
    seconds: float = arg("of measuring, about", "S", 60.0, positive=True)
    disk: Path | None = arg("whose disk's direct reads and writes are measured (the temporary one)", "DIR")
    out: Path | None = arg("cluster file to write, or to bring up to date", "FILE")


def run(args: DeviceOptions) -> int:
    """Measure, write the file, print it. Raises `UserError`, and `RunFailed` when a rank dies."""
    require("measuring", "torch")
    if not 1 <= args.ranks <= collective_bench.MOST_RANKS:
        raise UserError(f"--ranks {args.ranks}: between 1 and {collective_bench.MOST_RANKS} can measure on one host")
    before = known_cluster(args.out)
    kind = _kind(args)
    disk, why = _disk(args)
    measured = _measured(args, kind)
    device = _device(measured, args, kind)
    host = _host(measured["host"], disk, before, device)
    cluster = before or Cluster(1, args.ranks, device, Link(None, None), Link(None, None))
    intra = cluster.intra if cluster.intra.bandwidth else _link(device) or cluster.intra
    most = max(cluster.devices_per_node, args.ranks)
    kept = cluster if most == cluster.devices_per_node else cluster.without_paths()
    cluster = replace(kept, device=device, devices_per_node=most, intra=intra, host=host)
    if args.out:
        write_cluster(args.out, cluster, [f"{cluster.device.name}: {cluster.device.source}"])
    if args.json:
        print_json({"device": asdict(device), "host": asdict(host), "samples": measured["samples"]})
        return 0
    show(*_tables(device), *_host_lines(host, why))
    print(f"written: --cluster {shlex.quote(str(args.out))}" if args.out else "--out FILE.toml keeps it for --cluster")
    return 0


def cpu_name() -> str:
    """The host's processor as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _kind(args: DeviceOptions) -> Literal["cpu", "cuda"]:
    from shardwise.runtime.measure.hardware import has_cuda

    there = has_cuda()
    if args.device == "cuda" and not there:
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    kind: Literal["cpu", "cuda"] = "cpu" if args.device == "cpu" or not there else "cuda"
    if kind == "cuda" and args.ranks > 1:
        raise UserError("--ranks is for CPU processes, which share a machine; a CUDA device is measured alone")
    return kind


def _measured(args: DeviceOptions, kind: str) -> dict[str, Any]:
    from shardwise.runtime.measure.job import whole
    from shardwise.runtime.measure.probes import usual_job

    def job(out: str) -> dict[str, Any]:
        return asdict(usual_job(kind, args.seconds, args.transport, out))

    measurement: dict[str, Any] = whole("shardwise.runtime.measure.calibration", job, args.ranks, threads=args.threads)
    _check_limits(measurement["samples"], kind)
    return measurement


def _check_limits(samples: list[dict[str, Any]], kind: str) -> None:
    """Raise `RunFailed` for a sample that no device can have, measured twice."""
    from shardwise.runtime.job.launch import RunFailed

    late = above_limits([Probed(**sample) for sample in samples], kind)
    if late:
        more = f", and {len(late) - 1} more like it" if len(late) > 1 else ""
        raise RunFailed(
            f"measured {next(iter(late.values()))}, which no device can do{more}: nothing is written; measure again "
            "with more --seconds and nothing else running"
        )


def _device(measured: dict[str, Any], args: DeviceOptions, kind: Literal["cpu", "cuda"]) -> Device:
    from shardwise.predict.time.measuring import device_of
    from shardwise.runtime.measure.probes import MODEL

    about = measured["about"]
    if kind == "cuda":
        name, memory, more = about["name"], about["memory"], ""
    else:
        name, memory = cpu_name(), lookup("CPU").device.memory_bytes
        name = name if name[:1].isalpha() else f"CPU {name}"
        more = f" --ranks {args.ranks} --threads {args.threads} --transport {args.transport}"
    source = f"shardwise calibrate device --device {kind}{more}, {date.today()}, torch {about['torch']}"
    if args.ranks > 1:
        source += "; figures are one rank's while all work"
    return device_of(measured, name, kind, memory, MODEL, source)


def _disk(args: DeviceOptions) -> tuple[DiskRates | None, str]:
    """(speed of the disk, ""), or (None, why it could not be measured) of the temporary directory. Raises `UserError`
    for a folder that was given."""
    from shardwise.runtime.measure.hardware import disk_rates

    try:
        return disk_rates(args.disk or Path(tempfile.gettempdir())), ""
    except UserError as error:
        if args.disk is not None:
            raise
        return None, str(error)


def _host(measured: dict[str, float], disk: DiskRates | None, before: Cluster | None, device: Device) -> Host:
    """The measured host. Of a CPU, whose memory is the ranks' own, without memory; without a disk, with the speeds that
    the file had."""
    known = before.host if before else Host()
    read, write = (disk.read, disk.write) if disk else (known.disk_read, known.disk_write)
    memory = None if device.kind == "cpu" else machine_memory()
    source = f"copies of {device.source}; AdamW of all its ranks together"
    return Host(memory, measured["link_bandwidth"], None, measured["adamw_rate"], read, write, source=source)


def _host_lines(host: Host, why: str) -> Iterator[Renderable]:
    assert host.link_bandwidth and host.adamw_rate
    disk = why or "disk not measured"
    if host.disk_read and host.disk_write:
        disk = f"disk {format_bytes(host.disk_read)}/s read, {format_bytes(host.disk_write)}/s written"
    rates = f"copies {format_bytes(host.link_bandwidth)}/s, AdamW {format_count(host.adamw_rate)} parameters/s"
    yield from ("", f"host: {rates}", disk)


def _link(device: Device) -> Link | None:
    timed = device.measured.get("collectives")
    if not timed:
        return None
    seconds, sizes = timed["message"], timed["sizes"]
    return Link(seconds[0], sizes[-1] / seconds[-1], f"messages of {device.source}")


def _tables(device: Device) -> Iterator[Renderable]:
    from shardwise.predict.time.measuring import COUNTED, seconds_an_element

    assert device.memory_bandwidth
    values, bandwidth = device.measured["values"], device.memory_bandwidth
    figures = plain_table(("measured", *device.peak_flops))
    figures.add_row("matrix products", *(f"{rate / 1e9:,.0f} GFLOP/s" for rate in device.peak_flops.values()))
    for width in device.measured["attention"]["float32"]:
        forms = (device.measured["attention"][dtype][width] for dtype in device.peak_flops)
        figures.add_row(
            f"attention, heads of {width}", *(f"{format_share(form['efficiency'])} of it" for form in forms)
        )
    for of in (*COUNTED, "optimizer"):
        figures.add_row(
            of or "addition",
            *(f"{seconds_an_element(device, of, dtype) * 1e9:.2f} ns an element" for dtype in device.peak_flops),
        )
    call = values.get("pass_s", values.get("launch_s"))
    yield from (f"{device.name}: copies {format_bytes(bandwidth)}/s, {format_time(call)} to call an operation", figures)
    yield from _collectives(device)


def _collectives(device: Device) -> Iterator[Renderable]:
    timed = dict(device.measured.get("collectives", {}))
    if not timed:
        return
    sizes, message = timed.pop("sizes"), timed.pop("message")
    table = plain_table(("bytes", "message", *(op.replace("_", "-") for op in timed)))
    for k, nbytes in enumerate(sizes):
        times = (seconds[k] for op in timed.values() for seconds in op.values())
        table.add_row(format_bytes(nbytes, binary=True), format_time(message[k]), *map(format_time, times))
    yield from ("", table)
