"""Measured memory of published rows against what Megatron-DeepSpeed holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.model import ModelConfig
from shardwise.predict.megatron_memory import REDUCE_BUCKET, deepspeed_bytes
from shardwise.predict.scoreboard import PUBLISHED, memory_scores, read
from shardwise.predict.scoreboard.memory import _stages

USUAL = {
    "source_id": "bloom-chronicles", "source": "bigscience chronicles-prequel.md", "gpu": "A100-80GB-SXM",
    "schedule": "1F1B (Megatron-DeepSpeed)", "precision": "bf16", "recompute": "full", "seq": 2048,
    "vocab": 250880, "gated_ffn": False, "model": "BLOOM-prequel", "zero_stage": 1, "gpus": 384,
}  # fmt: skip
# hidden, layers, tp, pp, dp, mbs, GB that nvidia-smi showed, section
ROWS = [
    (14336, 72, 8, 12, 4, 2, 37, "48 node contenders"), (14336, 72, 8, 12, 4, 8, 69, "48 node contenders"),
    (14336, 72, 8, 6, 8, 4, 56, "48 node contenders"), (14336, 72, 4, 12, 8, 4, 60, "GBS Variations"),
    (14336, 72, 8, 2, 24, 1, 65, "GBS Variations"), (14336, 70, 8, 12, 4, 2, 40, "Rebalancing layers"),
    (14336, 70, 4, 12, 8, 2, 59, "Rebalancing layers"), (12288, 106, 4, 12, 8, 2, 65, "Rebalancing layers"),
]  # fmt: skip
NAMES = ("hidden", "layers", "tp", "pp", "dp", "mbs", "mem_gib_per_gpu", "notes")


def row(values) -> dict:
    found = USUAL | dict(zip(NAMES, values, strict=True))
    found["gbs"] = 2016 if found["dp"] == 24 else 2048
    return found | {"heads": 64, "kv_heads": 64, "head_dim": found["hidden"] // 64, "ffn": 4 * found["hidden"]}


def test_published_rows_are_near_and_below():
    """All too low: nvidia-smi counts what torch keeps for later, too (docs/prediction.md)."""
    (score,) = memory_scores([row(values) for values in ROWS])
    assert len(score.rows) == len(ROWS) and not score.skipped
    assert 0.08 < score.mean_abs_error < 0.16 and score.bias == pytest.approx(-score.mean_abs_error)
    assert max(abs(one.error) for one in score.rows) < 0.2


def test_what_differs_between_rows_goes_the_measured_way():
    one, two, *_ = (memory_scores([row(values)])[0].rows[0].nbytes for values in ROWS)
    assert (two - one) / (69 - 37) / 1e9 == pytest.approx(1.07, rel=0.1), "six more sequences a micro-batch"
    early, late = (
        memory_scores([row((14336, 70, 8, 12, 4, 2, 40, notes))])[0].rows[0].nbytes for notes in ("", ROWS[5][-1])
    )
    assert late > early, "gradients are summed in fp32"


def test_states_are_counted_as_documented():
    model = ModelConfig(name="m", vocab=1000, hidden=64, layers=4, heads=4, ffn=256, max_positions=64, kv_heads=4,
                        head_dim=16, gated=False, activation="gelu", norm="layernorm", positions="learned")  # fmt: skip

    def held(dp=1, sharded=False, wide=False) -> float:
        whole = deepspeed_bytes(model, [2, 2], 16, 1, 1, 1, dp, sharded, wide)
        return whole - REDUCE_BUCKET * (4 if wide else 2)

    weights = 2 * 12 * 64**2 + 1000 * 64
    assert held(wide=True) - held() == 4 * weights
    assert held(4, True) - held(8, True) == pytest.approx(18 * weights / 8)
    assert held(4, True, True) - held(8, True, True) == pytest.approx(12 * weights / 8)


def test_stages_hold_all_layers():
    assert _stages(72, 12, False) == [6] * 12 and _stages(78, 12, False) == [7] * 11 + [1]
    assert _stages(70, 12, True) == [5, *[6] * 10, 5] and _stages(10, 1, True) == [10]
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            assert all(sum(_stages(layers, pp, tables)) == layers for tables in (False, True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memory_is": "analytic"}, "its memory is analytic"),
        ({"mem_gib_per_gpu": "much"}, "must be a positive number"),
        ({"schedule": "1F1B", "precision": "fp16"}, "not known"),
        ({"recompute": "none"}, "not known"),
        ({"zero_stage": 3}, "not known"),
        ({"hidden": None}, "hidden must be"),
    ],
)
def test_rows_that_are_not_scored_say_why(change, reason):
    (score,) = memory_scores([row(ROWS[0]) | change])
    assert not score.rows and score.mean_abs_error is None and score.bias is None
    assert reason in next(iter(score.skipped))


def test_rows_without_memory_are_not_asked():
    assert memory_scores(read(PUBLISHED)) == []


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*USUAL, *NAMES} - {"source_id"})),
        st.none() | st.integers(-3, 10**9) | st.text(max_size=5) | st.booleans(),
        max_size=3,
    ),
    st.sampled_from(ROWS),
)
def test_any_row_is_scored_or_skipped(changes, values):
    for score in memory_scores([row(values) | changes]):
        assert len(score.rows) + sum(score.skipped.values()) == 1
