"""From samples to a rank's micro-batches: which sequences it trains on is a function of the step and its data rank."""

import numpy as np
import torch
from torch import Tensor

from shardwise.data import Sampler
from shardwise.data.dialogues import DialogueRows
from shardwise.decoder import Batch
from shardwise.layout.units import UnitPlan
from shardwise.runtime.job.setup import local_view


class Batches:
    """Micro-batches of `sampler`'s sequences for one rank. data_rank: its place among the data-parallel ranks."""

    def __init__(self, plan: UnitPlan, sampler: Sampler | DialogueRows, data_rank: int, device: torch.device) -> None:
        self.plan, self.sampler, self.data_rank, self.device = plan, sampler, data_rank, device

    def step(
        self, first: int, count: int, dropout_key: int | None, place: int | None = None
    ) -> list[tuple[Batch, Tensor]]:
        """This rank's micro-batches of the global batch of `count` samples that starts at sample `first`.

        Data rank r takes the r-th of dp equal runs of samples, or that of `place`. Returns (batch, targets
        [micro, seq]) pairs.
        """
        share, micro = count // self.plan.layout.dp, self.plan.layout.micro
        start = first + (self.data_rank if place is None else place) * share
        parts = [np.arange(at, at + micro) for at in range(start, start + share, micro)]
        return [self.micro_batch(self.sampler.batch(samples), samples, dropout_key) for samples in parts]

    def micro_batch(
        self, rows: dict[str, np.ndarray], samples: np.ndarray, dropout_key: int | None
    ) -> tuple[Batch, Tensor]:
        """One of `rows`, as the sampler gives them, with the global indices of their samples."""
        seq = self.plan.workload.seq

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        offsets = np.arange(seq)
        positions = tensor(rows["positions"] if "positions" in rows else np.tile(offsets, (len(samples), 1)))
        index = tensor(samples[:, None] * seq + offsets)
        documents = tensor(rows["documents"]) if "documents" in rows else None
        reference = tensor(rows["reference"]) if "reference" in rows else None
        batch = Batch(tensor(rows["inputs"]), positions, index, documents, positions, index, dropout_key, reference)
        return local_view(batch, tensor(rows["targets"]), self.plan)
