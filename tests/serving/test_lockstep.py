"""When ranks in step may rest: while nobody has anything to do, and no longer."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.serving.job import ServingJob
from shardwise.serving.lockstep import CONTROL, Lockstep
from shardwise.serving.messages import Cancel, Command, Drain, Request, Sampling, decode, encode

LLAMA = ModelConfig("m", vocab=53, hidden=24, layers=4, heads=4, kv_heads=2, ffn=42, max_positions=64)


class _Comms:
    """Nobody else is there. waits: for each wait, whether the rank rested, and what for."""

    def __init__(self) -> None:
        self.resting = False
        self.waits: list[tuple[bool, str]] = []

    def rest(self, resting: bool) -> None:
        self.resting = resting

    def all_reduce(self, tensor: torch.Tensor, axes: tuple[str, ...], unit: str, *, maximum: bool = False) -> None:
        self.waits.append((self.resting, unit))


class _Generator:
    """Computes nothing: every turn's tokens are 0."""

    def __init__(self, comms: _Comms) -> None:
        layout = Layout.parse("tp=2")
        self.comms, self.stage, self.device = comms, 0, torch.device("cpu")
        self.job, self.plan = ServingJob(LLAMA, layout, "nowhere", context=32), SimpleNamespace(layout=layout)

    def begin(self, turn: Any) -> None: ...
    def idle(self) -> None: ...
    def decode(self, turn: Any) -> None: ...
    def rows(self, turn: Any) -> None: ...
    def forward(self, turn: Any, rows: Any, x: Any) -> torch.Tensor:
        assert not self.comms.resting
        return torch.zeros(len(turn.wanted), LLAMA.vocab)


def test_ranks_rest_while_there_is_nothing_to_do_and_no_longer() -> None:
    comms = _Comms()
    asked: list[list[Command]] = [[], [], [Request(1, (1, 2, 3), Sampling(max_tokens=3))], [], [], [Cancel(9)], []]
    left = list(asked)
    lockstep = Lockstep(_Generator(comms), lambda idle: left.pop(0))  # type: ignore[arg-type]
    waited, states = [], []
    for _ in asked:
        comms.waits.clear()
        lockstep.step()
        assert not comms.resting and comms.waits[0][1] == CONTROL
        waited.append([resting for resting, _ in comms.waits])
        states.append(lockstep.active)
    assert states == [False, False, True, True, True, False, False]
    # A request comes into an idle turn, and its payload follows at once. That all tokens are there, the ranks tell each
    # other in the turn after the last one.
    assert waited == [[True], [True], [True, False], [False], [False], [False, False], [True]]


def test_commands_reach_other_ranks_as_they_are() -> None:
    sampling = Sampling(5, 0.1, 3, 0.30000000000000004, -(2**63), (7, 8), False, 20, True, 4)
    commands = [Request(1, (5, 0, 2**40), sampling), Cancel(9), Request(2, (1,), Sampling()), Drain()]
    assert decode(encode(commands)) == commands and decode(encode([])) == []


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([Cancel(1)]),
        b'[["exec", "import os"]]',
        b'[["Cancel", {"id": 1, "of": 2}]]',
        b'[["Request", {"id": 1, "prompt": [1], "sampling": {"max_tokens": "5", "stop_tokens": []}}]]',
        b'[["Request", {"id": 1, "prompt": [1], "sampling": {"stop_tokens": [], "code": 1}}]]',
        b'[["Token", {"id": 1, "token": 1, "logprob": 0}]]',
        b"5",
    ],
)
def test_anything_else_is_no_command(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, UserError)):
        decode(data)
