"""Measured speed of this host: values for the cluster file that `--cluster FILE` of other commands reads.

`device` times matrix products, attention, passes over memory and the trainer's collectives: with them `estimate`,
`plan` and `explain` say how long a step takes.

`topology` reads the output of `nvidia-smi topo -m`, or asks NVML: which links a node has, and what they can do.

`network` runs collectives on processes of this host, fits the latency of a round, the speed of reading, adding and
copying, and says how well that predicts sizes that the fit has not seen.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from shardwise.cli import calibrate_device, collective_bench
from shardwise.cli.clusters import check_name, known_cluster, write_cluster
from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_json, show
from shardwise.cluster import Cluster
from shardwise.cluster.topology import MOST_TEXT, Topology, advice, ask, cluster_of, device_of, explained, read
from shardwise.cluster.writing import to_toml
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.report.table import plain_table
from shardwise.report.units import format_bytes, format_share, format_time

if TYPE_CHECKING:
    from shardwise.schedule.fit import Accuracy, Figure, NetworkFit, Sample

SIZES = ",".join(f"{1 << k}KiB" for k in range(17))
_SETTLED = 0.1
"""Share by which the two quickest rounds of a call may differ to end its rounds."""
USELESS = 0.4
"""Median error of the sizes held back, above which the figures predict nothing."""
_BUSY = 1.2
"""The middle round over the quickest one, from which on a host counts as busy: on a quiet one they are nearly equal."""
_WITHIN = 0.1
_TIMES = {"intra.alpha": "alpha", "startup": "startup", "local.alpha": "copy_alpha"}
_SPEEDS = {"intra.beta": "bandwidth", "again": "again", "gamma": "addition", "local.beta": "copy"}
"""Figures of a fit -> their names in the file."""


@dataclass
class FitNetwork(CommandOptions):
    """Fit latency and speeds to collectives of this host's processes."""

    ranks: int = arg("processes to start", "P")
    transport: str = arg(default="shared", choices=("shared", "sends"))
    sizes: list[int] = arg(
        "every second is held back (1KiB-64MiB)", "SIZE,...", SIZES, read=collective_bench.sizes_of, shown=""
    )
    rounds: int = arg("how often each has its turn", "N", 7, positive=True)
    seconds: float = arg(
        "after about which each has two turns and no more; fewer where the numbers settle earlier",
        "S",
        90.0,
        positive=True,
    )
    force: bool = arg("write numbers whose own check fails, too")
    out: Path | None = arg("cluster file to write, or to bring up to date", "FILE")

    def run(self) -> int:
        from shardwise.runtime.job.launch import RunFailed
        from shardwise.runtime.job.output import say
        from shardwise.schedule import algorithms
        from shardwise.schedule.fit import accuracy, fit
        from shardwise.schedule.network import Network

        sizes = sorted(set(self.sizes))
        if len(sizes) < 3:
            raise UserError("--sizes: give three sizes or more, since every second one is held back")
        collective_bench.check(self.ranks, sizes)
        cluster = known_cluster(self.out) or Cluster.parse(f"{self.ranks}xcpu")
        chosen = [algorithm for algorithm in algorithms() if not algorithm.most or self.ranks <= algorithm.most]
        rounds = f"up to {self.rounds} rounds each, fewer where they agree within {_SETTLED:.0%}"
        say(
            f"{len(chosen)} algorithms at {len(sizes)} sizes on {self.ranks} ranks, {rounds}: at most about "
            f"{self.seconds:g} s (--seconds)"
        )
        samples, spread = _measured(self, chosen, sizes)
        held_back = set(sorted({sample.nbytes for sample in samples})[1::2])
        network_fit = fit([s for s in samples if s.nbytes not in held_back], reads=self.transport == "shared")
        command = (
            f"shardwise calibrate network --ranks {self.ranks} --transport {self.transport} --rounds {self.rounds}"
        )
        link = replace(network_fit.link("intra", f"{command}, {date.today()}, {_cpu()}"), kind=cluster.intra.kind)
        cluster = replace(
            cluster.without_paths(), intra=link, devices_per_node=max(cluster.devices_per_node, self.ranks)
        )
        checked = accuracy(
            [s for s in samples if s.nbytes in held_back], Network.of(cluster, self.ranks, repeated=True)
        )
        useless = checked.median_error is not None and checked.median_error > USELESS
        written = self.force or not useless
        if self.out and written:
            memory = "tensors that live in shared memory" if self.transport == "shared" else "gloo sends"
            lines = [f"{self.ranks} ranks of one host, {memory}; {date.today()}, {_cpu()}"]
            lines += [_verdict(checked), _noise(spread), "Behind figures: the interval of 80 of 100 resampled fits."]
            _write(self.out, cluster, network_fit, lines)
        if self.json:
            print_json({"samples": len(samples), "spread": spread, **_as_json(network_fit, checked, held_back)})
        else:
            _print(network_fit, checked)
            show(_noise(spread))
            if self.out and written:
                print(f"written: --cluster {shlex.quote(str(self.out))}")
        if self.out and not written:
            raise RunFailed(
                f"{self.out} is not written: the median error of the sizes held back is {checked.median_error:.0%}, "
                f"above {USELESS:.0%}; measure again when the host has nothing else to do, or give --force"
            )
        return 0


def _measured(args: FitNetwork, chosen: list[Any], sizes: list[int]) -> tuple[list[Sample], float]:
    """One sample for each algorithm and size, the lower quartile of its rounds, since what else runs on the host only
    ever adds to them; and their usual spread, the middle round over the quickest one."""
    from shardwise.schedule import build
    from shardwise.schedule.fit import Sample

    measured, failure = collective_bench.measure(args, chosen, sizes, args.seconds, _SETTLED)
    if failure is not None:
        raise failure
    schedules: dict[tuple[str, str], Any] = {}
    samples, spreads = [], []
    for cell in measured["cells"]:
        for row in cell["rows"]:
            if row["algorithm"]:
                key = cell["collective"], row["algorithm"]
                schedule = schedules.setdefault(key, build(*key, args.ranks, **row["options"]))
                seconds = row["seconds"] * (1 if len(row["seconds"]) > 1 else 2)
                samples.append(Sample(schedule, cell["bytes"], quantiles(seconds, n=4, method="inclusive")[0]))
                spreads.append(median(seconds) / min(seconds))
    return samples, median(spreads)


def _cpu() -> str:
    """The host's processor, and the cores that this process may use."""
    return f"{calibrate_device.cpu_name()}, {len(collective_bench.cores())} cores"


def _verdict(checked: Accuracy) -> str:
    error, chosen = checked.median_error, checked.chosen_well(_WITHIN)
    words = []
    if error is not None:
        words.append(f"median error {format_share(error)} above 64 KiB")
    if chosen is not None:
        words.append(
            f"the predicted cheapest algorithm is the measured one, or within {format_share(_WITHIN)} of it, "
            f"in {format_share(chosen)} of {len(checked.cells)} cells"
        )
    return f"Sizes held back: {'; '.join(words) or 'none that could be checked'}."


def _noise(spread: float) -> str:
    words = f"Of the rounds of a call, the middle one took {spread:.2f} times the quickest one."
    return f"{words} Other programs were at work: measure again when none are." if spread > _BUSY else words


def _write(file: Path, cluster: Cluster, network_fit: NetworkFit, header: list[str]) -> None:
    times = [(name, network_fit.constant[of]) for of, name in _TIMES.items() if of in network_fit.constant]
    remarks = {f"intra.{name}": _interval(figure, format_time) for name, figure in times}
    for k in range(len(network_fit.sizes)):
        speeds = [(name, network_fit.sized[of][k]) for of, name in _SPEEDS.items() if of in network_fit.sized]
        remarks[f"intra.speeds.{k}"] = "; ".join(f"{name} {_interval(figure, _speed, -1)}" for name, figure in speeds)
    write_cluster(file, cluster, header, remarks)


def _interval(figure: Figure, words: Callable[[float], str], order: int = 1) -> str:
    """The interval in words; order=-1 swaps its ends, since a speed is the inverse of a time."""
    return " to ".join(dict.fromkeys(map(words, (figure.low, figure.high)[::order])))


def _speed(seconds: float) -> str:
    return f"{format_bytes(1 / seconds)}/s" if seconds else "free"


def _print(network_fit: NetworkFit, checked: Accuracy) -> None:
    figures = plain_table(("figure", "memory of a rank", "value", "80% interval"))
    for of, name in _TIMES.items():
        if figure := network_fit.constant.get(of):
            figures.add_row(name, "", format_time(figure.value), _interval(figure, format_time))
    for of, name in _SPEEDS.items():
        for nbytes, figure in zip(network_fit.sizes, network_fit.sized.get(of, ()), strict=of in network_fit.sized):
            memory = format_bytes(nbytes, binary=True)
            figures.add_row(name, memory, _speed(figure.value), _interval(figure, _speed, -1))
    held = plain_table(("collective", "median error", "cells chosen well"))
    for collective in dict.fromkeys([*checked.errors, *(cell.collective for cell in checked.cells)]):
        errors = checked.errors.get(collective)
        cells = [cell for cell in checked.cells if cell.collective == collective]
        well = sum(cell.behind <= _WITHIN for cell in cells)
        held.add_row(
            collective, format_share(median(errors)) if errors else "-", f"{well} of {len(cells)}" if cells else "-"
        )
    show(figures, "", "sizes held back:", held, "", _verdict(checked))


def _as_json(network_fit: NetworkFit, checked: Accuracy, held_back: set[float]) -> dict[str, Any]:
    return {
        "figures": {name: figure._asdict() for name, figure in network_fit.constant.items()},
        "sizes": list(network_fit.sizes),
        "sized_figures": {name: [item._asdict() for item in row] for name, row in network_fit.sized.items()},
        "held_back": {
            "sizes": sorted(held_back),
            "median_error": checked.median_error,
            "errors": checked.errors,
            "chosen_well": checked.chosen_well(_WITHIN),
            "cells": [cell._asdict() for cell in checked.cells],
        },
    }


@dataclass
class ReadTopology(CommandOptions):
    """Read nvidia-smi topo -m: a cluster file with the links of such nodes."""

    table: str | None = word("output of nvidia-smi topo -m, - for standard input (ask NVML)", "FILE")
    device: str | None = arg("of the catalog (what nvidia-smi -L above the table says)", "NAME")
    nodes: int = arg("how many such nodes there are", "N", 1)
    nic_gbits: float | None = arg("Gb/s of a NIC (the catalog's usual network)", "X")
    islands: bool = arg("groups that NVLinks join are nodes, PCIe between them")
    out: Path | None = arg("cluster file to write (standard output)", "FILE")

    def run(self) -> int:
        check_name(self.out)
        topology = _read_topology(self.table)
        device = device_of(topology, self.device)
        cluster = cluster_of(topology, device, self.nodes, self.nic_gbits, self.islands)
        lines = [*explained(topology), *advice(cluster)]
        if self.json:
            print_json(_topology_json(topology, cluster, lines))
        if self.out:
            write_cluster(self.out, cluster, lines)
            if not self.json:
                print("\n".join([*lines, *_links(cluster), f"written: --cluster {shlex.quote(str(self.out))}"]))
        elif not self.json:
            print(to_toml(cluster, lines), end="")
        return 0


def _read_topology(table: str | None) -> Topology:
    if table is None:
        return ask()
    if table == "-":
        return read(sys.stdin.read(MOST_TEXT + 1))
    try:
        with Path(table).open(encoding="utf-8", errors="replace") as file:
            return read(file.read(MOST_TEXT + 1))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {table}: {getattr(error, 'strerror', None) or error}") from None


def _links(cluster: Cluster) -> Iterator[str]:
    for name, link in (("inside a node", cluster.intra), ("between nodes", cluster.inter)):
        if name == "inside a node" or cluster.nodes > 1:
            speed = f"{format_bytes(link.bandwidth)}/s" if link.bandwidth else "speed not known"
            yield f"{name}: {speed} a device, one direction ({link.source})"


def _topology_json(topology: Topology, cluster: Cluster, lines: list[str]) -> dict[str, object]:
    links = {name: keyed(getattr(cluster, name), "bandwidth alpha source") for name in ("intra", "inter")}
    return {
        "cluster": str(cluster),
        **keyed(cluster, "nodes devices_per_node"),
        "paths": dict(topology.between()),
        "islands": [list(island) for island in topology.islands()],
        "nics": list(topology.nics),
        "near_nics": list(topology.near_nics()),
        "explained": lines,
        "order": [int(gpu.removeprefix("GPU")) for gpu in topology.ordered().gpus],
        "by_pair": [list(row) for row in cluster.paths.names] if cluster.paths else None,
        "shared_nics": cluster.nics or None,
        **links,
    }


ACTIONS = {
    "device": (calibrate_device.DeviceOptions, calibrate_device.run),
    "topology": ReadTopology,
    "network": FitNetwork,
}
