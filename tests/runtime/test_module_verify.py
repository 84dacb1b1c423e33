"""`verify`: true for modules that are split right, and for others the first module or parameter that differs."""

import json
import os
import subprocess
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from harness import forked
from harness.cases import from_table, table
from harness.module_jobs import verdict
from harness.own_modules import (
    FAMILIES,
    GPT2_PLAN,
    OWN,
    PLANS,
    T5_PLAN,
    SkipMLP,
    Unordered,
    exact,
    gpt2,
    image_example,
    llama,
    own_batch,
    qwen3,
    t5,
    t5_example,
    token_example,
    vit,
)
from harness.today import some_of
from shardwise import UserError, suggest, verify

SOURCE = str(Path(__file__).parents[2] / "src")
pytestmark = pytest.mark.usefixtures("leftovers")
EXACT = 1e-12
"""Of models that compute in float64 throughout."""


def shardwise(*words: str) -> subprocess.CompletedProcess[str]:
    return forked.shardwise(*words, environment={**os.environ, "PYTHONPATH": SOURCE}, timeout=120)


LAYOUTS = table(__file__, "LAYOUTS")


@pytest.mark.parametrize(("family", "layout"), some_of(product(FAMILIES, LAYOUTS), 14, "families by verify"))
def test_transformers_classes_are_split_right(family, layout):
    plan = GPT2_PLAN if family == "gpt2" else None
    result = verdict(partial(exact, family), layout, token_example(), plan, tolerance=EXACT)
    assert result, str(result)
    assert result.modules >= 30 and result.parameters >= 15 and result.error < EXACT


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "tp=2"])
def test_the_example_gives_the_order_of_blocks(layout):
    ids = own_batch("nested", 4, 0)[:1]
    result = verdict(Unordered, layout, ids, suggest(Unordered, ids), tolerance=EXACT)
    assert result, str(result)


@pytest.mark.parametrize("layout", some_of(LAYOUTS, 2, "layouts of T5"))
def test_an_encoder_with_a_decoder_is_split_right(layout):
    result = verdict(t5, layout, t5_example(), T5_PLAN)
    assert result, str(result)


BY_DATA = table(__file__, "BY_DATA")
"""For a model that publishes no plan."""


@pytest.mark.parametrize("layout", some_of(BY_DATA, 2, "layouts of ViT"))
def test_a_model_of_images_is_split_right(layout):
    result = verdict(vit, layout, image_example())
    assert result, str(result)


@pytest.mark.parametrize("name", ["skips", "states", "shared", "routed"])
def test_own_modules_are_split_right(name):
    example = (own_batch(name, 4, 0)[0],)
    for layout in ("dp=2,zero=3,recompute=full", "tp=2", "dp=2,tp=2,zero=3"):
        result = verdict(OWN[name], layout, example, PLANS[name])
        assert result, str(result)


def test_a_wrong_plan_names_the_first_wrong_module():
    """row instead of column, and the other way round."""
    example = (own_batch("skips", 4, 0)[0],)
    wrong = verdict(OWN["skips"], "tp=2", example, {"blocks.*.up": "row", "blocks.*.down": "row"})
    assert not wrong and wrong.module == "blocks.0.up" and "RuntimeError" in wrong.reason
    wrong = verdict(OWN["skips"], "tp=2", example, {"blocks.*.up": "column", "blocks.*.down": "column"})
    assert not wrong and wrong.module == "blocks.0.down"


def test_a_module_that_mixes_its_inputs_is_named():
    """Half of the outputs of a map that are then chunked into signal and gate are half of either."""
    example = (own_batch("states", 4, 0)[0],)
    plan = {"blocks.*.enter": "column", "blocks.*.leave": "rowwise_split_input"}
    wrong = verdict(OWN["states"], "tp=2", example, plan)
    assert not wrong and wrong.module is not None and wrong.module.startswith("blocks.0")


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3"])
def test_the_silent_trap_of_query_and_key_norms_is_named(layout):
    """Outputs are right, and so are all other gradients."""
    plan = {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    }
    norms = {f"model.layers.*.self_attn.{x}_norm": "replicated_with_grad_allreduce" for x in "qk"}
    assert verdict(qwen3, layout, token_example(), plan | norms)
    wrong = verdict(qwen3, layout, token_example(), plan | {"model.layers.*.self_attn.k_norm": norms.popitem()[1]})
    assert not wrong and wrong.module is None
    assert wrong.parameter == "model.layers.0.self_attn.q_norm.weight"


def test_trap_33_gradients_of_head_norms_of_a_users_module_are_summed():
    result = verdict(qwen3, "dp=2,tp=2,zero=3", token_example())
    assert result, str(result)


def test_caches_among_the_outputs_are_no_part_of_the_loss():
    """Keys and values that tensor-parallel ranks have of their own heads alone."""
    example = {"input_ids": token_example()["input_ids"], "use_cache": True}
    result = verdict(llama, "dp=2,tp=2,zero=1", example)
    assert result, str(result)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,tp=2,zero=3", "pp=2,dp=2"])
def test_a_loss_among_the_outputs_is_the_mean_over_a_ranks_own_tokens(layout):
    """Uneven numbers of labels, and none at all in the last row."""
    ids = token_example()["input_ids"]
    labels = ids.clone()
    labels[0, 2:], labels[-1] = -100, -100
    for given in (ids, labels):
        result = verdict(qwen3, layout, {"input_ids": ids, "labels": given, "use_cache": False})
        assert result, str(result)


class LossAlone(SkipMLP):
    """A mean over the tokens that are not negative is its only output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = super().forward(x).logsumexp(-1)
        return losses[x[:, 0] >= 0].mean()


class WrongLoss(LossAlone):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss * (1 + 1e-6 * ("forward" in vars(self.enter)))


def test_a_module_whose_only_output_is_its_loss_is_split_right():
    x = own_batch("skips", 6, 0)[0]
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    for layout in ("dp=2,zero=1", "dp=3,zero=3,recompute=full"):
        result = verdict(LossAlone, layout, (x,))
        assert result and result.modules > 10, str(result)
    wrong = verdict(WrongLoss, "dp=2", (x,))
    assert not wrong and wrong.module == "WrongLoss" and "its output differs by 1.0e-06" in wrong.reason


def test_trap_33_maps_with_transposed_weights_are_cut():
    result = verdict(gpt2, "tp=2", token_example(), GPT2_PLAN)
    assert result, str(result)


def test_heads_that_tp_does_not_divide_are_named():
    with pytest.raises(AssertionError, match=r"tp=4 does not divide the 2 of num_key_value_heads .*valid tp: 1, 2"):
        verdict(qwen3, "tp=4", token_example())


# -- from outside: processes of its own


MODULE = table(__file__, "MODULE")


def test_the_command_says_what_is_right_and_what_is_wrong(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(MODULE)
    words = ["verify", f"{file}:build", "--layout", "dp=2,tp=2,zero=3", "--plan"]
    for plan in ("up=column,down=row", "suggest"):
        done = shardwise(*words, plan)
        assert (done.returncode, done.stderr) == (0, "")
        assert "equal to one device. Outputs of 3 modules and gradients of 4 parameters" in done.stdout
    done = shardwise(*words, "up=column,down=replicate", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 1 and not data["equal"] and data["module"] == "down" and "RuntimeError" in data["reason"]


@from_table
def test_bad_input_is_one_line_and_code_2(words, message, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(MODULE)
    words = [word.format(file=file) for word in words]
    done = shardwise("verify", *words, *([] if "--layout" in words else ["--layout", "dp=1"]))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_modules_and_functions_are_handed_to_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    x = own_batch("skips", 2, 0)[0].float()
    torch.manual_seed(1)
    assert verify(OWN["skips"](), "dp=2,zero=2", x)
    with pytest.raises(UserError, match="cannot hand the module"):
        verify(lambda: OWN["skips"](), "dp=2", x)
