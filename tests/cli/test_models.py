"""`--set`: whatever value a field is given, a command answers or says in one line why it cannot."""

import contextlib
import dataclasses
import io
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli.main import main
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.changes import change
from shardwise.model.config import Experts, LatentAttention

COMMANDS = [
    words.split()
    for words in (
        "plan llama-3-8b --cluster 8xH100 --seq 512 --batch 8 --fix tp=2,pp=1,cp=1 --json",
        "estimate llama-3-8b --cluster 8xH100 --layout tp=2,dp=4,zero=1,sp --seq 512 --batch 8",
        "estimate gpt2 --cluster 4xcpu --layout dp=4,zero=3 --seq 64 --batch 4 --json",
    )
]
FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
VALUES = st.sampled_from(
    ["1e20", "1" + "0" * 20, str(2**63 - 1), "9" * 5000, "1000000007", "-1", "0", "1", "2", "3", "0.5", "nan", "inf",
     "-inf", "1e308", "1e-320", "", "none", "true", "all", "alibi", "learned", "layernorm", "gelu"]
) | st.integers().map(str) | st.floats().map(str)  # fmt: skip


def ends(argv: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    said = out.getvalue()
    # With --json a mistake is an object on standard output, too; without, nothing is there.
    wrong = json.loads(said) if code and "--json" in argv else {}
    assert (said == "" or "error" in wrong) == (code != 0)
    return code, err.getvalue()


@given(st.sampled_from(COMMANDS), st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3))
@settings(max_examples=150)
def test_any_value_of_any_field(command, changes):
    code, told = ends([*command, *(f"--set={field}={value}" for field, value in changes)])
    assert (code, told) == (0, "") or (code == 2 and told.count("\n") == 1 and len(told) < 500)


MIXTURE = ["estimate", "tiny-deepseek", "--cluster", "2xcpu", "--layout", "dp=2,ep=2", "--seq", "64", "--batch", "2"]
PARTS = {"experts": Experts, "latent_attention": LatentAttention}
NESTED = [f"{part}.{field.name}" for part, of in PARTS.items() for field in dataclasses.fields(of)]


@given(st.lists(st.tuples(st.sampled_from([*NESTED, *PARTS]), VALUES), min_size=1, max_size=3))
@settings(max_examples=60)
def test_any_value_of_any_field_of_a_part(changes):
    code, told = ends([*MIXTURE, *(f"--set={field}={value}" for field, value in changes)])
    assert (code, told) == (0, "") or (code == 2 and told.count("\n") == 1 and len(told) < 500)


def test_fields_of_a_part_change_together():
    model = change(get("tiny-deepseek"), "experts.groups=2,experts.active_groups=1,experts.capacity=1.25,hidden=64")
    experts = dataclasses.replace(get("tiny-deepseek").experts, groups=2, active_groups=1, capacity=1.25)
    assert model == get("tiny-deepseek").replace(experts=experts, hidden=64)
    narrow = change(get("tiny-deepseek"), "latent_attention.rope_head_dim=4,latent_attention.q_rank=0")
    assert (narrow.head_dim, narrow.latent_attention.q_rank) == (20, 0)
    assert change(get("deepseek-v3"), "rope_scaling=none").rope_scaling is None
    assert change(get("tiny-mixtral"), "experts=none").experts is None
