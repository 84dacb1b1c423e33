"""A server whose ranks another launcher has started, on one host or several: torchrun, or srun.

Rank 0's process is the front end, whose child is rank 0. The other processes are ranks: they meet rank 0 in the
launcher's store, where it leaves their job and the address of the front end. The first rank of each replica talks to it
over TCP in JSON. Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.serving.job import Loading, Ready, ServingJob
from shardwise.serving.messages import COMMANDS, Finished, ReplicaLoad, Token, decode, encode

MEETING = "meeting.json"
"""File of the front end's folder: what rank 0 has to say to all ranks."""
_KINDS = COMMANDS | {kind.__name__: kind for kind in (Token, Finished, ReplicaLoad, Loading, Ready)}


@dataclass(frozen=True)
class RankMeeting(Json):
    """What the ranks of another launcher learn from rank 0."""

    job: ServingJob
    host: str
    port: int
    """Where the front end listens."""
    key: str
    """Hexadecimal digits of the key that both ends must know."""

    def connect(self, replica: int) -> MessageChannel:
        """The channel of a replica's first rank to the front end."""
        channel = MessageChannel(Client((self.host, self.port), "AF_INET", authkey=bytes.fromhex(self.key)))
        channel.send(replica)
        return channel


class MessageChannel:
    """A connection that carries messages as JSON, with the methods of `Connection`: nothing that arrives is code."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, messages: int | Sequence[object]) -> None:
        self._connection.send_bytes(b"%d" % messages if isinstance(messages, int) else encode(messages))

    def recv(self) -> Any:
        """What the other end has sent. Raises `EOFError` once it has gone, and for anything that is no message."""
        try:
            data = self._connection.recv_bytes()
            return int(data) if data.isdigit() else decode(data, _KINDS)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EOFError(f"no message: {error}") from None

    def close(self) -> None:
        """End the connection, also for a thread that waits for a message. May be called again."""
        if not self._connection.closed:
            with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
            self._connection.close()


class MessageListener:
    """Where a front end takes the channels of its replicas."""

    def __init__(self, folder: Path, job: ServingJob, key: bytes) -> None:
        self._listener = Listener(("", 0), "AF_INET", backlog=job.replicas + 1, authkey=key)
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), self._listener.address[1]
        assert isinstance(port, int)
        (folder / MEETING).write_text(json.dumps(RankMeeting(job, host, port, key.hex()).to_json()))
        self._port, self._key = port, key

    def accept(self) -> MessageChannel:
        return MessageChannel(self._listener.accept())

    def wake(self) -> None:
        """Have a waiting `accept` return, with a channel at its end."""
        Client(("127.0.0.1", self._port), "AF_INET", authkey=self._key).close()

    def close(self) -> None:
        self._listener.close()


def launched_ranks() -> int | None:
    """Ranks that another launcher has started, this process included; None without a launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def check_ranks(job: ServingJob) -> None:
    """Raise `UserError` where a launcher has started another number of ranks than the layout has."""
    world = launched_ranks()
    if world is not None and world != job.layout.ranks:
        raise UserError(
            f"the launcher has started {world} ranks, and {job.layout} has {job.layout.ranks}: start as many"
        )
