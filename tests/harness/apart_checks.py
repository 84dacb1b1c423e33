"""What must hold of replicas that train apart from each other, each as a function that asserts."""

import pytest
import torch

from harness.apart import Apart, alone
from harness.checks import assert_ledger, assert_memory, train
from harness.jobs import RankOutcome
from harness.reference import Outcome
from shardwise.layout import Mesh
from shardwise.layout.axes import REPLICA
from shardwise.model import ModelConfig
from shardwise.model.parameters import parameters

TOLERANCE = 1e-9


def blank(model: ModelConfig) -> Outcome:
    zeros = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in parameters(model)}
    return Outcome([], [], zeros, zeros)


def trained(apart: Apart) -> list[RankOutcome]:
    expected = alone(apart.case, apart.layout)
    against = Outcome([], [], expected.first_grads, expected.final)
    return train(apart.case, apart.layout, against, transport=apart.transport)


def assert_predicted(apart: Apart, ranks: list[RankOutcome]) -> None:
    """Ledger and memory of a step with an outer step; and between outer steps nothing goes from replica to replica."""
    assert_ledger(apart.case, apart.layout, ranks)
    assert_memory(apart.case, apart.layout, ranks)
    assert all(REPLICA[0] not in row.axes.split("_") for rank in ranks for row in rank.between)
    assert all(bool(rank.between) == (apart.layout.every > 1) for rank in ranks)
    crossing = [row for row in ranks[0].role.ledger if row.axes == REPLICA[0]]
    assert bool(crossing) == (apart.layout.independent > 1)


def assert_as_alone(apart: Apart, ranks: list[RankOutcome]) -> None:
    """Weights, losses and norms are those of as many models on one device."""
    expected, mesh = alone(apart.case, apart.layout), Mesh.of(apart.layout, apart.case.model)
    for name, value in expected.final.items():
        error = sum(rank.final_errors.get(name, 0.0) for rank in ranks) ** 0.5
        assert error <= TOLERANCE * float(value.norm()), f"{name}: off by {error:.2e}"
    for rank, outcome in enumerate(ranks):
        replica = mesh.index(REPLICA, rank)
        assert outcome.losses == pytest.approx(expected.losses[replica], rel=TOLERANCE)
        assert outcome.norms == pytest.approx(expected.norms[replica], rel=TOLERANCE)
        assert outcome.agreed == pytest.approx(expected.agreed, rel=TOLERANCE)
        assert outcome.agreed == ranks[0].agreed
    pieces: dict[tuple, str] = {}
    for outcome in ranks:
        for key, digest in outcome.pieces.items():
            assert pieces.setdefault(key, digest) == digest, f"replicas differ in {key}"
