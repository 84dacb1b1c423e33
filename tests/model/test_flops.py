"""FLOPs against brute force and against the formulas of the papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.model.catalog import get
from shardwise.model.flops import (
    attention_flops_per_token,
    forward_flops_per_token,
    hardware_flops_per_token,
    matmul_parameters,
    training_flops_per_sequence,
    training_flops_per_token,
)
from shardwise.model.parameters import count, parameters


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt", "gpt2", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v3"])
def test_matmul_parameters_are_the_matrices_that_a_token_meets(name):
    config = get(name)
    met = config.vocab * config.hidden
    for p in parameters(config):
        met_here = config.experts.active / config.experts.count if p.cut == "expert" else 1
        if len(p.shape) == 2 and p.part not in ("embedding", "head"):
            met += p.numel * met_here
    assert matmul_parameters(config) == met


@given(seq=st.integers(1, 10**6), name=st.sampled_from(["gpt3-175b", "megatron-22b", "megatron-1t"]))
def test_megatron_formula(seq, name):
    """72 B s l h² (1 + s / 6h + V / 12lh), here in integers."""
    c = get(name)
    layers = 12 * c.layers * c.hidden**2 + 2 * c.layers * seq * c.hidden
    assert training_flops_per_sequence(c, seq, causal=False) == 6 * seq * (layers + c.vocab * c.hidden)


@given(seq=st.integers(1, 10**6))
def test_palm_formula_with_grouped_heads(seq):
    c = get("llama-3-8b")
    norms = (2 * c.layers + 1) * c.hidden
    n = count(c) - c.vocab * c.hidden - norms
    assert training_flops_per_token(c, seq, causal=False) == 6 * n + 12 * c.layers * c.heads * c.head_dim * seq


@given(seq=st.integers(1, 10**6), name=st.sampled_from(["tiny-llama", "deepseek-v3"]))
def test_causal_attention_counts_the_lower_triangle(seq, name):
    c = get(name)
    full = seq * attention_flops_per_token(c, seq, causal=False)
    pairs = sum(range(1, seq + 1)) if seq < 1000 else seq * (seq + 1) // 2
    assert seq * attention_flops_per_token(c, seq) * seq**2 == full * pairs
    weights = 2 * matmul_parameters(c)
    assert forward_flops_per_token(c, seq) - weights == attention_flops_per_token(c, seq)


def test_latent_attention_has_its_own_head_widths():
    # DeepSeek-V3: 61 layers, 128 heads; a score takes 192 products, a value 128.
    assert attention_flops_per_token(get("deepseek-v3"), 1) == 2 * 61 * 128 * (192 + 128)


def test_backward_is_twice_forward_and_a_sequence_its_tokens():
    c = get("gpt2")
    assert training_flops_per_token(c, 7) == 3 * forward_flops_per_token(c, 7)
    assert training_flops_per_sequence(c, 7, False) == 7 * training_flops_per_token(c, 7, False)


def test_tying_saves_memory_but_no_operation():
    c = get("tiny-gpt")
    assert training_flops_per_token(c, 64) == training_flops_per_token(c.replace(tied=False), 64)


def test_empty_sequence_is_refused():
    with pytest.raises(UserError, match="at least one token"):
        training_flops_per_token(get("gpt2"), 0)


def test_recomputation_adds_what_runs_again():
    model = get("megatron-175b")
    once, forward = training_flops_per_token(model, 2048), forward_flops_per_token(model, 2048)
    head = 2 * model.vocab * model.hidden
    assert hardware_flops_per_token(model, 2048) == once == 3 * forward
    assert hardware_flops_per_token(model, 2048, "full") == 4 * forward - head
    assert hardware_flops_per_token(model, 2048, "selective") == once + attention_flops_per_token(model, 2048)
