"""Persistent buffers of a user's module in checkpoints: whole, by name, for any layout."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.pool import run_ranks
from shardwise import Layout, UserError
from shardwise.checkpoint import Checkpoint
from shardwise.runtime.module.buffers import KIND, persistent, restore_buffers, stored, stored_shapes


@pytest.mark.parametrize(
    ("before", "after"),
    [("dp=2,zero=3", "pp=2"), ("pp=2", "tp=2"), ("pp=2,virtual=2,schedule=interleaved", "pp=2,dp=2,zero=1")],
)
def test_trap_36_buffers_are_continued_under_any_layout(before, after, tmp_path):
    run_ranks("harness.module_jobs:buffers_of", Layout.parse(before).ranks, (before, str(tmp_path), ""))
    tensors = Checkpoint.open(tmp_path / "step-0").tensors
    names = [f"blocks.{block}.{leaf}" for block in range(4) for leaf in ("scale", "runs")]
    assert {name for name in tensors if name.startswith(f"{KIND}/")} == {f"{KIND}/{name}" for name in names}
    for buffers in run_ranks("harness.module_jobs:buffers_of", Layout.parse(after).ranks, (after, "", str(tmp_path))):
        assert list(buffers) == names
        for number, (name, buffer) in enumerate(buffers.items()):
            assert torch.equal(buffer, torch.full_like(buffer, number + 1)), name
            assert buffer.dtype == (torch.int64 if name.endswith("runs") else torch.float64)


@pytest.mark.parametrize("layout", ["dp=2", "pp=2,dp=2"])
def test_each_micro_batch_passes_once(layout):
    """A pass that finds the shapes of messages leaves no trace: two micro-batches are counted twice."""
    for runs in run_ranks("harness.module_jobs:passes", Layout.parse(layout).ranks, layout):
        assert set(runs) == {2}


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([[[True], [False]]]))
        self.register_buffer("angles", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("empty", torch.ones(0))


def test_buffers_of_every_type_are_stored_as_numbers():
    module = Buffers()
    assert list(persistent(module)) == ["count", "mask", "angles", "short"]
    shapes = {"count": (1,), "mask": (2, 1), "angles": (2, 2), "short": (2,)}
    assert stored_shapes(module) == {f"{KIND}/{name}": shape for name, shape in shapes.items()}
    dtypes = [str(stored(name, buffer).dtype) for name, buffer in persistent(module).items()]
    assert dtypes == ["torch.float64", "torch.float64", "torch.float32", "torch.bfloat16"]
    with pytest.raises(UserError, match="the buffer big has integers of more than 53 bits"):
        stored("big", torch.tensor(2**60 + 1))


def test_a_checkpoint_without_buffers_leaves_them():
    """Those of earlier versions have none."""
    module = Buffers()
    restore_buffers(module, SimpleNamespace(tensors={}))
    assert module.count == 3 and module.mask.any()
