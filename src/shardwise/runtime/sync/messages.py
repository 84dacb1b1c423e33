"""Messages between workers and parameter servers: a head of eight numbers, and for most of them a flat tensor.

Between processes they go over two gloo groups of all ranks, one for requests and one for answers, so that threads of
one process never share a group; within a process they go through queues. A server takes requests from anyone; a worker
awaits the answer of the server that it asked.
"""

import queue
import struct
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

PUSH, FENCE, GET, PUT, BEGIN, DONE = range(6)
"""Kinds of requests: a gradient, for which the answer has new weights; weights of at least so many updates; a piece of
state; state to be kept; how many updates there have been; no more requests."""
_NUMBERS = 8


class Header(NamedTuple):
    """What a message says. Of a request: its kind; a, b, c as the kind has them; three figures. Of an answer: 0; the
    updates in the weights, what to do next, the step before which to stop (0: none); loss and gradient norm."""

    kind: int
    a: int = 0
    b: int = 0
    c: int = 0
    elements: int = 0
    """Elements of the tensor that follows."""
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    """Of a gradient: seconds since its worker began to compute it. Of an answer: updates that were left out."""

    def packed(self) -> Tensor:
        figures = struct.unpack("3q", struct.pack("3d", *self[5:]))
        return torch.tensor([*self[:5], *figures], dtype=torch.int64)

    @classmethod
    def unpacked(cls, numbers: Tensor) -> Self:
        kind, a, b, c, elements, *figures = numbers.tolist()
        return cls(kind, a, b, c, elements, *struct.unpack("3d", struct.pack("3q", *figures)))


class ServerMail:
    """The groups of requests and answers, and the queues inside this process. Every rank of the job makes one.

    timeout: seconds that a rank waits for others.
    """

    def __init__(self, timeout: float) -> None:
        self.rank = dist.get_rank()
        self._requests, self._answers = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) for _ in range(2)
        )
        self.take: Callable[[int, Header, Tensor | None], None] | None = None
        """The server in this process, which copies what it is given."""
        self._answered: queue.Queue[Header | BaseException] = queue.Queue()
        self._into: Tensor | None = None

    # -- of workers

    def ask(self, server: int, head: Header, tensor: Tensor | None = None) -> list[Any]:
        """Send a request to the server on a rank. The tensor may be reused when the works that are returned are
        over."""
        if server == self.rank:
            assert self.take is not None
            self.take(self.rank, head, tensor)
            return []
        works = [dist.isend(head.packed(), server, self._requests)]
        if tensor is not None:
            works.append(dist.isend(tensor, server, self._requests))
        return works

    def expect(self, server: int, into: Tensor) -> None:
        """Say where the tensor of the next answer of a server in this process goes."""
        if server == self.rank:
            self._into = into

    def answer_of(self, server: int, into: Tensor) -> Header:
        """Wait for the answer of the server on a rank; its tensor is in `into` afterwards."""
        if server == self.rank:
            found = self._answered.get()
            if isinstance(found, BaseException):
                raise found
            return found
        numbers = torch.empty(_NUMBERS, dtype=torch.int64)
        dist.recv(numbers, server, self._answers)
        head = Header.unpacked(numbers)
        if head.elements:
            dist.recv(into[: head.elements], server, self._answers)
        return head

    # -- of servers

    def next_request(self, room: Callable[[int, Header], Tensor]) -> tuple[int, Header, Tensor | None]:
        """Wait for a request from another process: its rank, its head and its tensor, in memory that `room` gives."""
        numbers = torch.empty(_NUMBERS, dtype=torch.int64)
        rank = dist.recv(numbers, None, self._requests)
        head = Header.unpacked(numbers)
        tensor = None
        if head.elements:
            tensor = room(rank, head)
            dist.recv(tensor, rank, self._requests)
        return rank, head, tensor

    def reply(self, rank: int, head: Header, tensor: Tensor | None = None) -> list[Any]:
        """Answer a worker. The tensor may be reused when the works that are returned are over."""
        if rank == self.rank:
            if tensor is not None:
                assert self._into is not None
                self._into[: len(tensor)].copy_(tensor)
            self._answered.put(head)
            return []
        works = [dist.isend(head.packed(), rank, self._answers)]
        if tensor is not None:
            works.append(dist.isend(tensor, rank, self._answers))
        return works

    def fail(self, error: BaseException) -> None:
        """The server in this process has ended: pass the error to its own worker."""
        self._answered.put(error)
