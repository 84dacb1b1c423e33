"""Hosts of the lab in tests, where this machine allows them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.lab.link import LabLink
from shardwise.lab.network import LabNetwork, lab_network
from shardwise.runtime.job.hosts import VARIABLE, HostFile


@cache
def why_not() -> str:
    """Why no hosts can be made here; empty where they can."""
    try:
        with lab_network([LabLink(1e9)] * 2):
            return ""
    except UserError as error:
        return str(error)


def needs_hosts() -> None:
    if reason := why_not():
        pytest.skip(reason)


@contextmanager
def hosts(links: str, count: int, folder: Path) -> Iterator[tuple[LabNetwork, dict[str, str]]]:
    """(hosts that are up, the environment of a launcher that uses them)."""
    with lab_network([LabLink.parse(links)] * count) as network:
        file = folder / "hosts.json"
        HostFile(network.hosts).write(file)
        yield network, {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: str(file)}


def namespaces(pid: int | None = None) -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob(f"shardwise-lab-{pid or os.getpid()}-*"))
