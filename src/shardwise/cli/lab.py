"""Run a command's ranks on several hosts that are made on this machine, with the links that you give.

Each host is a network namespace behind one switch; the bandwidth holds in both directions. A shardwise command starts
its ranks there itself, the first ranks on the first host. Any other command runs once per host, such as torchrun:

shardwise lab --nodes 2 --link 100Mb/s -- torchrun --nproc-per-node 2 train.py
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.cli.clusters import check_name, write_cluster
from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_json
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.lab.job import LabResult, run_command
from shardwise.lab.link import LabLink, lab_cluster
from shardwise.lab.network import MOST_HOSTS, LabNetwork, lab_network
from shardwise.records import dataclass
from shardwise.report.units import format_bytes, format_time
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.job.output import say
from shardwise.runtime.job.signals import handled

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class LabOptions(CommandOptions):
    nodes: int = arg("hosts, 2 to 8", "N", 2)
    link: tuple[str, ...] = arg(
        "of each host to the switch: 1Gb/s[,latency=5ms][,loss=0.1%%]; once for all hosts, or once for each (1Gb/s)",
        "TEXT",
        (),
    )
    cluster: Path | None = arg(
        "this machine as `calibrate device --ranks N --transport gloo` measured it: reports of runs in the lab then "
        "predict time",
        "FILE",
    )
    out: Path | None = arg("write the hosts as a cluster file, for estimate and plan; needs --cluster", "FILE")
    command: tuple[str, ...] = word("what to run", "-- COMMAND", (), nargs="...")


def run(args: LabOptions) -> int:
    command = list(args.command[args.command[:1] == ("--",) :])
    links = links_of(args.nodes, args.link or ("1Gb/s",))
    if not command and args.out is None:
        raise UserError("name a command: shardwise lab --nodes 2 --link 1Gb/s -- shardwise train ...")
    received: list[int] = []
    with temporary_folder() as folder:
        cluster = _cluster_file(args, links, folder)
        if not command:
            return 0
        with handled(_SIGNALS, lambda number, frame: received.append(number)), lab_network(links) as network:
            result = run_command(command, network, folder, received, cluster=cluster, stdout=2 if args.json else None)
    _show(args, network, result)
    return 128 + received[0] if received and not result.code else result.code


def links_of(nodes: int, texts: Sequence[str]) -> list[LabLink]:
    """The links of so many hosts. Raises `UserError`."""
    if not 2 <= nodes <= MOST_HOSTS:
        raise UserError(f"--nodes {nodes}: give 2 to {MOST_HOSTS} hosts")
    if len(texts) not in (1, nodes):
        raise UserError(f"--link is given {len(texts)} times for {nodes} hosts: give it once, or once for each")
    links = [LabLink.parse(text) for text in texts]
    return links * nodes if len(links) == 1 else links


def _cluster_file(args: LabOptions, links: list[LabLink], folder: Path) -> Path | None:
    """The file that describes the hosts as a cluster; None where this machine has not been measured."""
    check_name(args.out)
    if args.cluster is None:
        if args.out is not None:
            raise UserError("--out needs --cluster FILE: measure this machine with `shardwise calibrate device`")
        return None
    file = args.out or folder / "lab.toml"
    cluster = lab_cluster(Cluster.parse(str(args.cluster)), links)
    write_cluster(file, cluster, [f"{len(links)} hosts of shardwise lab, each with a link of {links[0]}"])
    if args.out is not None:
        say(f"written: --cluster {args.out}")
    return file


def _show(args: LabOptions, network: LabNetwork, result: LabResult) -> None:
    """What crossed the ports: standard output is the command's, but with --json."""
    hosts = [
        {"host": node, "address": host.address, "link": str(link), "sent_bytes": sent, "received_bytes": received}
        for node, (host, link, (sent, received)) in enumerate(
            zip(network.hosts, network.links, result.traffic, strict=True)
        )
    ]
    if args.json:
        latency = "relay" if network.relayed else "kernel"
        print_json({"code": result.code, "seconds": result.seconds, "forwarded_by": latency, "hosts": hosts})
        return
    say(f"lab: {len(hosts)} hosts, {format_time(result.seconds)}")
    for row in hosts:
        say(_line(row))


def _line(row: dict[str, Any]) -> str:
    sent, received = format_bytes(row["sent_bytes"]), format_bytes(row["received_bytes"])
    return f"  host {row['host']}  {row['link']}  sent {sent}, received {received}"
