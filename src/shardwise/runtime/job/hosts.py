"""Placement of a launch's ranks on hosts: this one, or those of a file that the environment names. Imports no torch.

`SHARDWISE_HOSTS` is the path of a JSON file: {"hosts": [{name, address, interface, enter}, ...], "cluster": FILE}. Each
host is a network of its own on this machine, as `shardwise lab` makes them. Ranks fill host after host, meet over TCP
at the first host's address, and share memory with no other host.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shardwise.errors import UserError
from shardwise.small_files import read_small

VARIABLE = "SHARDWISE_HOSTS"
LOOPBACK = "127.0.0.1"
PORT = 29500
"""Rendezvous port where none is chosen: nothing else listens in a network of its own."""


@dataclass(frozen=True)
class LaunchHost:
    """A host on which the launcher can start ranks."""

    name: str
    address: str
    """IPv4 address at which the other hosts reach it."""
    interface: str
    """Name of its network interface, for gloo."""
    enter: tuple[str, ...]
    """Words before a command that run it on this host, such as ip netns exec NAME."""

    def environment(self) -> dict[str, str]:
        """Variables of every rank on this host. Its addresses have no names, of which torch would warn."""
        level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        return {"GLOO_SOCKET_IFNAME": self.interface, "TORCH_CPP_LOG_LEVEL": level}


@dataclass(frozen=True)
class HostFile:
    """Hosts of all launches of a command."""

    hosts: tuple[LaunchHost, ...] = ()
    """Empty: this machine, without a network of its own."""
    cluster: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def from_environment(cls) -> Self:
        """The file that `SHARDWISE_HOSTS` names; no hosts where it is not set. Raises `UserError` for a bad file."""
        name = os.environ.get(VARIABLE)
        if not name:
            return cls()
        try:
            data = json.loads(read_small(Path(name)))
            hosts = [LaunchHost(**{**item, "enter": tuple(item["enter"])}) for item in data["hosts"]]
            return cls(tuple(hosts), data["cluster"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = getattr(error, "strerror", None) or "it is not as `shardwise lab` writes it"
            raise UserError(f"{VARIABLE}={name}: {reason}; unset it, or start the command by `shardwise lab`") from None


@dataclass(frozen=True)
class Placement:
    """Ranks of one launch, spread over hosts."""

    ranks: int
    hosts: tuple[LaunchHost, ...] = ()
    joined: bool = False
    """Whether this process is rank 0 of another launcher, whose variables hold for the one rank that it starts."""

    @property
    def per_host(self) -> int:
        """Ranks on each host; the last one may have fewer."""
        return -(-self.ranks // max(1, len(self.hosts)))

    @property
    def address(self) -> str:
        """Address at which the ranks meet when they do so over TCP."""
        return self.hosts[0].address if self.hosts else LOOPBACK

    def command(self, rank: int, command: list[str]) -> list[str]:
        return [*self.hosts[rank // self.per_host].enter, *command] if self.hosts else command

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of a rank that tell it from the others."""
        if self.joined:
            return {}
        local = {"RANK": str(rank), "LOCAL_RANK": str(rank % self.per_host), "LOCAL_WORLD_SIZE": str(self.per_host)}
        return local | (self.hosts[rank // self.per_host].environment() if self.hosts else {})
