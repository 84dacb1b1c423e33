"""What ranks run for the test of generation's ledgers: scripted requests, turn by turn, each turn recorded."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shardwise.decoder.experts import Mixture
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import CP, DP, PP, TP
from shardwise.model import ModelConfig
from shardwise.ops.exchange import TokenExchange
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.measure.memory import LiveStorages
from shardwise.serving.engine import TokenGenerator
from shardwise.serving.job import ServingJob
from shardwise.serving.lockstep import Lockstep
from shardwise.serving.messages import Command, Drain, encode


@dataclass(frozen=True)
class Script:
    """asked: replica -> turn (from 1) -> what its first rank then hears. Drain comes by itself after the last one."""

    model: ModelConfig
    layout: str
    asked: dict[int, dict[int, list[Command]]]
    job: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """One turn of one rank. heard: bytes of messages, on the first rank of a replica. active: somebody in step has
    something to do."""

    prefill: bool
    tokens: int
    rows: int
    heard: int
    active: bool
    ledger: tuple[LedgerRow, ...]
    top: int = 0
    choices: dict[str, list[int]] = field(default_factory=dict)
    """Part -> pairs of its tokens for each expert of the rank's place."""


@dataclass(frozen=True)
class Followed:
    """What a rank did, and what it held: bytes of weights, of the slots of gathered ones, of its cache; and the most of
    storages that came and went in a turn."""

    turns: list[Seen]
    weights: int
    slots: int
    cache: int
    passing: int


class Small:
    def read(self, tensor: str, piece: Any = None, dtype: str | None = None, out: Any = None) -> np.ndarray:
        assert out is not None
        size = out.size
        values = torch.linspace(-0.1, 0.1, size, dtype=torch.float32)
        if dtype == "bfloat16":
            out.reshape(-1)[:] = values.to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            out.reshape(-1)[:] = values.numpy()
        return out


class Passing(LiveStorages):
    """Storages that come and go; matrices that oneDNN has laid out have none."""

    def _add(self, value: Any, made_by: str) -> None:
        if not (isinstance(value, torch.Tensor) and value.is_mkldnn):
            super()._add(value, made_by)


def _note_choices(generator: TokenGenerator, choices: dict[str, list[int]]) -> None:
    """Have each mixture say what its tokens have chosen in a turn."""
    for part, module in generator.stages.parts.items():
        for mixture in module.modules():
            if isinstance(mixture, Mixture):
                exchange: TokenExchange = mixture.forward.exchange  # type: ignore[attr-defined]

                def noted(sent: torch.Tensor, counts: Any = exchange.counts, part: str = part) -> Any:
                    choices[part] = sent.tolist()
                    return counts(sent)

                exchange.counts = noted  # type: ignore[method-assign]


def follow(rank: int, script: Script) -> Followed:
    job = ServingJob(model=script.model, layout=Layout.parse(script.layout), weights="none", **script.job)
    comms = make_comms(job.layout, job.model, rank, timeout=60.0)
    generator = TokenGenerator(job, comms, rank, torch.device("cpu"))
    generator.load(Small())
    mesh = Mesh.of(job.layout, job.model)
    replica = mesh.index(DP, rank)
    first = mesh.index(CP + TP + PP, rank) == 0 and replica < job.replicas
    mine = dict(script.asked.get(replica, {}))
    number, heard = 0, 0

    def hear(idle: bool) -> list[Command]:
        nonlocal heard
        found = mine.pop(number, []) or ([Drain()] if idle and not mine else [])
        heard = len(encode(found)) if found else 0
        return found

    choices: dict[str, list[int]] = {}
    _note_choices(generator, choices)
    lockstep, more = Lockstep(generator, hear if first else None), True
    seen: list[Seen] = []
    lasting = [p.data for p in generator.stages.decoder.parameters()]
    lasting += [each for kind in generator.engine.storages().values() for each in kind]
    lasting += [cache.tensor for cache in generator.caches.values()]
    watched = Passing({tensor.untyped_storage()._cdata for tensor in lasting})
    while more:
        number += 1
        comms.start_recording()
        with watched:
            done = lockstep.step()
        comms.stop_recording()
        more = done.more
        seen.append(
            Seen(
                done.step.prefill, done.step.tokens, len(done.step.wanted), heard, lockstep.active, comms.ledger(),
                done.step.top, dict(choices),
            )
        )  # fmt: skip
        choices.clear()
    lockstep.finish()
    comms.close()
    slots = sum(tensor.nbytes for tensor in generator.engine.storages()["comm"])
    return Followed(seen, generator.parameter_bytes, slots, generator.cache_bytes, watched.peak)
