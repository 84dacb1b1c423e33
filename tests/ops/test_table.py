"""The table of forms on blocks that it has no row for: their parts get theirs, and the result stays the plain one's."""

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwise.decoder.modules import GatedMLP, Linears, RMSNorm
from shardwise.model import ModelConfig
from shardwise.ops.context import Options
from shardwise.ops.cpu.products import Packed
from shardwise.ops.generate import GenerationContext
from shardwise.ops.products import MakeProduct, Plain
from shardwise.ops.table import TABLE, lower

MODEL = ModelConfig("m", vocab=17, hidden=24, layers=1, heads=4, kv_heads=2, ffn=20, max_positions=64)


class Sandwich(nn.Module):
    """A block of no family: a norm before its feed-forward part and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(MODEL.hidden, 1e-6), RMSNorm(MODEL.hidden, 1e-6)
        self.mlp, self.extra = GatedMLP(MODEL), Linears(MODEL.hidden, {"a": 5, "b": 7}, bias=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.extra(x + self.after(self.mlp(self.before(x))))


@pytest.mark.parametrize("keep", [Plain(), Packed()], ids=["plain", "packed"])
def test_a_new_block_generates_without_a_row(keep: MakeProduct) -> None:
    plain = Sandwich()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.3)
    lowered, x = copy.deepcopy(plain).requires_grad_(False), torch.randn(1, 6, MODEL.hidden)
    lower(lowered, GenerationContext("block", Options("generate"), keep=keep))
    assert "forward" not in vars(lowered) and "forward" in vars(lowered.mlp)
    for got, wanted in zip(lowered(x), plain(x), strict=True):
        torch.testing.assert_close(got, wanted.detach())


def test_what_a_form_computes_itself_gets_no_form() -> None:
    block = Sandwich()
    lowered = lower(block, GenerationContext("block", Options("generate")))
    assert not lowered.writing and not lowered.breaks
    for linear in (*block.extra.maps, *block.mlp.gate_up.maps):
        assert "forward" not in vars(linear)
    assert "forward" in vars(block.mlp.down)


def test_a_row_is_for_one_kind_and_mode() -> None:
    forms = [(row.mode, row.kind, row.form, row.device) for row in TABLE]
    assert len(set(forms)) == len(forms)
