"""`suggest`: the plans that `transformers` publishes, found without them, and plans where none is published."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.module_jobs import verdict
from harness.own_modules import _SMALL, FAMILIES, OWN, gpt2, own_batch, summed_loss, token_example
from harness.pool import RankFailed
from shardwise import UserError, suggest, verify
from shardwise.layout.styles import style_of
from shardwise.runtime.module.suggest import why_not


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_SMALL))


def olmo2() -> nn.Module:
    """Norms over all heads of queries and keys, which need these whole."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**_SMALL | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}))


PUBLISHED = {name: build for name, build in FAMILIES.items() if name != "gpt2"} | {"mistral": mistral, "olmo2": olmo2}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_plans_are_found(family):
    model = PUBLISHED[family]()
    plan = suggest(model, token_example())
    published = model._tp_plan
    assert len(published) >= 6
    assert {name: style_of(plan[name], name) for name in published} == {
        name: style_of(style, name) for name, style in published.items()
    }
    assert not plan.keys() - published.keys()  # it adds nothing


@pytest.mark.parametrize("family", PUBLISHED)
def test_every_parameter_is_cut_or_has_a_reason(family):
    model = PUBLISHED[family]()
    plan = suggest(model, token_example())
    for name, parameter in model.named_parameters():
        pattern = ".".join("*" if step.isdigit() else step for step in name.split("."))
        owner = pattern.rpartition(".")[0]
        cut = owner in plan and plan[owner] != "replicated_with_grad_allreduce"
        assert cut != (pattern in plan.whole), name
        assert cut or (parameter.dim() == 1 and plan.whole[pattern])


def test_heads_limit_the_degree():
    assert suggest(FAMILIES["llama"](), token_example()).units == 2
    assert suggest(FAMILIES["llama"](num_key_value_heads=4), token_example()).units == 4


def test_gpt2_gets_a_plan_that_is_correct():
    plan = suggest(gpt2(), token_example())
    assert plan["transformer.h.*.mlp.c_fc"] == "column" and plan["transformer.h.*.mlp.c_proj"] == "row"
    assert plan.exchanged["transformer.h.*.attn.c_attn"] == "split takes a part of its elements"
    for layout in ("tp=2", "dp=2,tp=2,zero=3"):
        result = verdict(gpt2, layout, token_example(), plan)
        assert result, str(result)


SEEN = [name for name in OWN if name != "routed"]
"""All but the one whose code depends on the values of tensors."""


@pytest.mark.parametrize("name", SEEN)
def test_own_modules_get_plans_that_are_correct(name):
    inputs = own_batch(name, 4, 0)[0]
    plan = suggest(OWN[name](), (inputs,))
    assert suggest(OWN[name](), own_batch(name, 4, 0), loss=summed_loss) == plan
    assert plan
    result = verdict(OWN[name], "dp=2,tp=2,zero=1", (inputs,), plan)
    assert result, str(result)


def test_a_table_that_an_unknown_map_reads_stays_whole():
    ids = (own_batch("tied", 4, 0)[0],)
    plan = suggest(OWN["tied"](), ids)
    assert "table" not in plan and "head.weight" in plan.whole
    with pytest.raises(RankFailed, match="head, a ScaledMap, reads all of a weight"):
        verdict(OWN["tied"], "tp=2", ids, {"table": "vocab"})


def test_what_depends_on_values_has_no_suggestion():
    with pytest.raises(UserError, match="give a plan of your own"):
        suggest(OWN["routed"](), (own_batch("routed", 4, 0)[0],))


def test_a_weight_that_is_read_past_its_map_stays_whole():
    plan = suggest(OWN["shared"](), (own_batch("shared", 4, 0)[0],))
    assert plan["blocks.*.up"] == "column" and plan["blocks.*.down"] == "row"
    assert plan.whole["blocks.0.shared.weight"] == "it is read outside of its map, too"


class Net(nn.Module):
    """An attention of its own, with heads apart from the batch in one dim, and a gated feed-forward part."""

    heads = -1  # of whole weights, or of a part

    def __init__(self, heads: int = 4, width: int = 16) -> None:
        super().__init__()
        self.width = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=name == "q") for name in "qkvo")
        self.norm = nn.LayerNorm(width // heads)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            each(x).view(rows, tokens, self.heads, self.width).transpose(1, 2).reshape(-1, tokens, self.width)
            for each in (self.q, self.k, self.v)
        )
        scores = torch.softmax(torch.bmm(self.norm(q), k.transpose(1, 2)), -1)
        mixed = torch.bmm(scores, v).view(rows, -1, tokens, self.width).permute(0, 2, 1, 3).flatten(2)
        x = x + self.o(mixed)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_heads_beside_the_batch_are_followed():
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    plan = suggest(Net(), x)
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), "column")
    assert plan == columns | {"o": "row", "down": "row", "norm": "replicated_with_grad_allreduce"}
    assert plan.units == 4
    result = verdict(Net, "tp=2", x, plan)
    assert result, str(result)


class Fixed(Net):
    heads = 4


def test_sizes_in_a_modules_code_are_found_by_running_it():
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    plan = suggest(Fixed(), x)
    assert plan["q"] == plan["up"] == "colwise_gather_output"
    assert "its module cannot compute with a part of them (shape '[" in plan.exchanged["q"]
    result = verdict(Fixed, "tp=2", x, plan)
    assert result, str(result)


class Biased(nn.Module):
    """A sum with a buffer that a part of the map's outputs does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.register_buffer("offset", torch.zeros(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)[:, :, None, None].expand(-1, -1, 3, 3) + self.offset


def test_a_plan_that_does_not_run_has_a_reason_and_torch_prints_nothing(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    reason = why_not(Biased(), {"blocks.0": "column"}, torch.zeros(2, 8), 2)
    log.removeHandler(caplog.handler)
    assert "Biased does not run with its plan" in str(reason) and not caplog.records


def test_a_plan_goes_to_verify_as_it_is(monkeypatch):
    x = own_batch("skips", 4, 0)[0].float()
    assert verify(OWN["skips"], "tp=2", x, plan=suggest(OWN["skips"], x))


class ByValue(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_bad_input_is_one_line():
    with pytest.raises(UserError, match=r"ByValue cannot be traced: it decides by .*; give a plan of your own"):
        suggest(nn.Sequential(ByValue(4, 4))[0], torch.ones(2, 4))
    with pytest.raises(UserError, match="no tensor with rows"):
        suggest(nn.Linear(4, 4), 3)
