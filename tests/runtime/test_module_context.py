"""Context parallelism of a user's module: each rank has some tokens of every row, and attention sees the others."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.cases import from_table
from harness.module_jobs import OwnTraining, reference, styled_loss, trained, verdict
from harness.own_modules import ATTENDING, AttentionBlock, AttentionModel, exact, token_example
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, UserError
from shardwise.errors import LayoutError
from shardwise.layout.modules import check_module_layout
from shardwise.runtime.module.class_model import ClassModel
from shardwise.runtime.module.context import check_tokens

CUTS = [
    "cp=2", "cp=2,cpkind=ulysses", "cp=2,cpkind=allgather,recompute=full", "cp=4,zero=1", "dp=2,cp=2,zero=3,shard=2",
    "cp=2,tp=2,zero=2", "cp=2,tp=2,sp", "cp=2,pp=2", "cp=2,offload=cpu,offload_activations=cpu",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    some_of([each for each in product(ATTENDING, CUTS) if not ("moe" in each[0] and "sp" in each[1].split(","))], 4,
            "modules with cut sequences"),
)  # fmt: skip
def test_cut_sequences_train_like_one_device(name: str, layout: str) -> None:
    """Losses, gradient norms, weights and outputs, with as many targets as a row happens to have."""
    trained(OwnTraining(name, layout, 2 if "pp" in layout else 1))


def test_a_checkpoint_continues_with_whole_sequences_and_back(tmp_path: Path) -> None:
    job = OwnTraining("attends", "cp=2,zero=3", save=str(tmp_path))
    run_ranks("harness.module_jobs:train_own", 2, (job, reference("attends")[1]))
    for layout in ("dp=2,zero=1", "cp=4,cpkind=ulysses"):
        trained(OwnTraining("attends", layout, load=str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "layout"),
    some_of(product(["llama", "qwen3", "gpt2", "mixtral"], ["cp=2", "cp=2,cpkind=ulysses", "dp=2,cp=2,zero=3"]), 2,
            "classes with cut sequences"),
)  # fmt: skip
def test_classes_of_transformers_are_cut_right(family: str, layout: str) -> None:
    result = verdict(partial(exact, family), layout, token_example(seq=8), tolerance=1e-12)
    assert result, str(result)


def test_rows_are_cut_along_their_tokens_whatever_comes_first() -> None:
    assert run_ranks("harness.module_jobs:styled_loss", 2, "cp=2") == [pytest.approx(styled_loss(0, ""), rel=1e-12)] * 2


# -- bad input: one line says what is wrong, and what to do


class Convolved(AttentionModel):
    """Neighbors meet before attention, too."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(16, 16, 3, padding=2)

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.table(ids)
        x = x + self.near(x.transpose(1, 2))[..., :-2].transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Silent(Convolved):
    """The same, at first without effect."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.near.parameters():
            nn.init.zeros_(parameter)


class Counting(AttentionModel):
    """Positions by the length of what it is given."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(ids)


class Attending(AttentionModel):
    """Attention with other arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = partial(self._block, block, options)

    @staticmethod
    def _block(block: AttentionBlock, options: Any, x: Tensor) -> Tensor:
        q, k, v = block._heads(block.norm(x))
        return x + block.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


class NoPositions(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (Convolved, "meet elsewhere than in torch's scaled_dot_product_attention"),
    "convolution of zeros": (Silent, "meet elsewhere than in torch's scaled_dot_product_attention"),
    "positions": (Counting, "meet elsewhere than in torch's scaled_dot_product_attention"),
    "mask": (lambda: Attending(attn_mask=torch.zeros(1, 1)), "has a mask"),
    "both ways": (Attending, "is not causal"),
    "dropout": (lambda: Attending(is_causal=True, dropout_p=0.1), r"dropout \(0.1\): set attention_dropout to 0"),
    "no positions": (NoPositions, "takes no position_ids"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_cut_is_one_line(name: str) -> None:
    made, message = MODULES[name]
    torch.manual_seed(0)
    ids = torch.randint(24, (2, 8))
    for example in (ids, {"ids": ids}, (ids, torch.arange(8)[None])):
        check_tokens(AttentionModel(), example)
    with pytest.raises(UserError, match=message) as caught:
        check_tokens(made(), ids)
    assert "\n" not in str(caught.value)


@from_table
def test_a_layout_that_cannot_be_cut_is_one_line(layout: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_module_layout(Layout.parse(layout))


@from_table
def test_a_loss_or_batch_that_cannot_be_cut_is_one_line(kind: str, message: str) -> None:
    for said in run_ranks("harness.module_jobs:refused_cut", 2, kind):
        assert re.search(message, said) and "\n" not in said, said


def test_a_window_is_refused_by_name() -> None:
    fields = {"model_type": "mistral", "sliding_window": 4, "num_hidden_layers": 2}
    config = ClassModel({"model_type": "mistral"}, "m").small(Layout()).config.to_dict() | fields
    with pytest.raises(LayoutError, match="sliding_window = 4 tokens"):
        ClassModel(config, "m").split(Layout.parse("cp=2"), 8)
