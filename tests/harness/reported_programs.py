"""Public reports of programs that hang or run out of memory, rebuilt small: report -> the program, and its cause.

The line that ends in `# CAUSE` is the one to be named.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.audited_programs import Program, lines_of
from harness.cases import table

HEAD = table(__file__, "HEAD")
DDP = """
model = DistributedDataParallel(net())
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
train(model, opt, 3)
"""


@dataclass(frozen=True)
class Report:
    """A program of a report. rank: the one at fault; None where all are."""

    ranks: int
    text: str
    rank: int | None
    words: str
    """In the first line."""

    @property
    def program(self) -> Program:
        text = HEAD + self.text
        return Program("reported", self.ranks, "", text, "reported", self.rank or 0, lines_of(text, "CAUSE"))


REPORTS = {
    # Only rank 0 comes to the barrier: the others have returned.
    "https://github.com/EleutherAI/sparsify/pull/5": Report(3, DDP + """
def save():
    if rank != 0:
        return
    dist.barrier()  # CAUSE
save()
train(model, opt, 3)
""", 0, "barrier"),
    # Rank 0 validates, and DDP's forward pass broadcasts the buffers, while the others wait at a barrier.
    "https://github.com/pytorch/pytorch/issues/54059": Report(3, DDP + """
if rank == 0:
    model.eval()
    model(torch.randn(4, 16))  # CAUSE
dist.barrier()
train(model, opt, 3)
""", 0, "broadcast"),
    # An IterableDataset has one batch less on a rank, which leaves the loop.
    "https://github.com/pytorch/pytorch/issues/141069": Report(2, """
model = DistributedDataParallel(net())
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for batch in range(5 - rank):
    model(torch.randn(4, 16)).square().mean().backward()  # CAUSE
    opt.step()
    opt.zero_grad()
""", 1, "rank 1"),
    # Each rank stops early by its own metric, and waits for the others at the end.
    "https://github.com/huggingface/transformers/issues/17478": Report(3, DDP + """
for epoch in range(4):
    train(model, opt, 2)
    if rank == 2 and epoch == 1:
        break
dist.barrier()  # CAUSE
""", 2, "barrier"),
    # A checkpoint is saved on rank 0 alone, with a barrier inside, which meets the next one of the others.
    "https://github.com/alan-turing-institute/autocast/pull/386": Report(3, DDP + """
if rank == 0:
    dist.barrier()  # CAUSE
dist.barrier()
""", 0, "barrier"),
    # The full state of FSDP is gathered on rank 0 alone.
    "https://github.com/pytorch/pytorch/issues/73383": Report(3, """
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
model = net()
for block in model: fully_shard(block)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
train(model, opt, 3)
if rank == 0:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # CAUSE
train(model, opt, 3)
""", 0, "all_gather"),
    # The optimizer has the parameters as they were before FSDP: whole, on every rank.
    "https://github.com/mosaicml/composer/pull/1732": Report(2, """
from torch.distributed.fsdp import fully_shard
model = net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for block in model: fully_shard(block)
fully_shard(model)
train(model, opt, 4)
dist.destroy_process_group()
""", None, "before they were sharded"),
}  # fmt: skip
