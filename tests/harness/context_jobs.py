"""What ranks run for the tests of context parallelism: attention alone, compared with one device."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.attention import CoreAttention
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import CP
from shardwise.layout.context import SequenceCut
from shardwise.model import ModelConfig
from shardwise.ops.blockwise import Explicit, FlashOnCPU
from shardwise.report.step_report import LedgerRow
from shardwise.runtime.context import cores as ring
from shardwise.runtime.context import ulysses
from shardwise.runtime.context.view import ContextBatch, block_scores, local_places
from shardwise.runtime.transport.comms import Comms


@dataclass(frozen=True)
class AttentionJob:
    cp: int
    kind: str
    seq: int
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    documents: bool = False
    explicit: bool = False
    dtype: str = "float64"
    shared: bool = True
    seed: int = 0


def whole_batch(job: AttentionJob, cut: SequenceCut) -> Batch:
    places = torch.arange(cut.padded).expand(job.batch, -1)
    documents = None
    if job.documents:
        lengths = torch.randint(1, 8, (cut.padded,), generator=torch.Generator().manual_seed(job.seed + 1))
        documents = torch.repeat_interleave(torch.arange(cut.padded), lengths)[: cut.padded].expand(job.batch, -1)
    return Batch(places, places, places, documents, places, places)


def drawn(job: AttentionJob, cut: SequenceCut) -> list[Tensor]:
    """q, k, v and the gradient of the output, of all tokens; that of tokens that fill up is 0."""
    generator, width = torch.Generator().manual_seed(job.seed), 8
    tensors = [
        torch.randn(job.batch, cut.padded, heads, width, generator=generator, dtype=torch.float64)
        for heads in (job.heads, job.kv_heads, job.kv_heads, job.heads)
    ]
    tensors[3][:, job.seq :] = 0
    return [x.to(getattr(torch, job.dtype)) for x in tensors]


def core_of(job: AttentionJob) -> CoreAttention:
    widths = {"hidden": 8 * job.heads, "heads": job.heads, "kv_heads": job.kv_heads, "ffn": 8}
    return CoreAttention(ModelConfig("core", vocab=8, layers=1, max_positions=64, **widths), "core")


def whole(job: AttentionJob, cut: SequenceCut) -> list[Tensor]:
    q, k, v, grad = drawn(job, cut)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = core_of(job)(*leaves, whole_batch(job, cut))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attend(rank: int, job: AttentionJob) -> tuple[float, tuple[LedgerRow, ...]]:
    """(the largest difference of this rank's output and gradients from one device's, the ledger)."""
    layout = Layout(cp=job.cp, cpkind=job.kind)
    cut = SequenceCut.of(layout, job.seq)
    comms = Comms(Mesh(layout), rank, (CP,), timeout=60.0, shared=job.shared)
    places = local_places(cut, rank, torch.device("cpu"))
    everything = whole_batch(job, cut)
    mine = everything.positions[:, places]
    batch = ContextBatch(mine, mine, mine, None, mine, mine, whole=everything)
    *leaves, grad = [x[:, places].contiguous() for x in drawn(job, cut)]
    leaves = [x.requires_grad_() for x in leaves]
    module = core_of(job)
    comms.start_recording()
    if job.kind == "ulysses":
        out = ulysses.attend(comms, "core", partial(module, batch=everything), everything.index.shape[1], *leaves)
    else:
        kernel = (Explicit if job.explicit else FlashOnCPU)(module.scale)
        core = ring.ContextCore(comms, cut, kernel, "core", lambda b, other: block_scores(b, module, cut, rank, other))
        out = ring.attend(core, job.kind == "allgather", *leaves, batch)
    local = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    comms.stop_recording()
    real = places < job.seq
    differences = [
        (a[:, real].double() - b[:, places][:, real].double()).abs().max().item()
        for a, b in zip(local, whole(job, cut), strict=True)
        if real.any()
    ]
    ledger = comms.ledger()
    dist.barrier()
    comms.close()
    return max(differences, default=0.0), ledger
