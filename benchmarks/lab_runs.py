"""What benchmarks in `shardwise lab` share: this machine as its ranks measure it, and whole trainings on hosts."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.cluster import Cluster, Device, Link
from shardwise.lab.job import run_command
from shardwise.lab.link import LabLink, lab_cluster
from shardwise.lab.network import LabNetwork, lab_network
from shardwise.predict.time.measuring import device_of
from shardwise.runtime.measure import probes
from shardwise.runtime.measure.job import whole

LENGTHS = {"axes": [[16, 128, 512]] * 3, "widths": [64], "lengths": [16, 64, 128], "tokens": 64}
"""Shapes of the calibration: a step has few tokens."""
MESSAGES = [1 << k for k in range(10, 23, 3)]
MEMORY = 8 << 30
"""Bytes, which the time does not depend on."""


def calibrated(seconds: float, ranks: int) -> tuple[Device, Link]:
    """The device that so many ranks at once have here, and the link between two of them."""

    def job(out: str) -> dict[str, Any]:
        usual = probes.usual_job("cpu", seconds, "gloo", out)
        return asdict(replace(usual, **LENGTHS, sizes=MESSAGES))

    told = whole("shardwise.runtime.measure.calibration", job, ranks, threads=1)
    device = device_of(told, "here", "cpu", MEMORY, probes.MODEL, "benchmarks/lab_runs.py")
    timed = device.measured["collectives"]
    seconds_a_message, sizes = timed["message"], timed["sizes"]
    return device, Link(seconds_a_message[0], sizes[-1] / seconds_a_message[-1])


def hosts_of(device: Device, inside: Link, links: Sequence[LabLink], per_host: int) -> Cluster:
    """The cluster of a lab's hosts, each with so many ranks."""
    return lab_cluster(Cluster(1, len(links) * per_host, device, inside, inside), list(links))


class Trained(NamedTuple):
    """What a training in the lab left: its `result.json`, its events, and the bytes that left each host."""

    result: dict[str, Any]
    events: list[dict[str, Any]]
    sent: list[int]

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first."""
        return [event["seconds"] for event in self.events if "seconds" in event][1:]


class Lab(NamedTuple):
    """Hosts that are up."""

    network: LabNetwork
    folder: Path

    def train(self, words: Sequence[str]) -> Trained:
        """`shardwise train` with these words on the hosts. Raises `RuntimeError` when it fails."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            # Beside the others, so that all have the corpus of the first.
            out, said = Path(f"{place}-run"), Path(place, "said.txt")
            command = ["shardwise", "train", *words, "--out", str(out), "--no-tensorboard", "--validate-batches", "1"]
            with said.open("w") as file:
                ended = run_command(command, self.network, Path(place), [], stdout=file.fileno())
            if ended.code:
                raise RuntimeError(said.read_text())
            result = json.loads((out / "result.json").read_text())
            events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
            return Trained(result, events, [port.sent for port in ended.traffic])


@contextmanager
def lab(links: Sequence[LabLink]) -> Iterator[Lab]:
    """Hosts with these links, until the end of the block."""
    with lab_network(list(links)) as network:
        yield Lab(network, _folder())


@cache
def _folder() -> Path:
    """Where trainings of this process run."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
