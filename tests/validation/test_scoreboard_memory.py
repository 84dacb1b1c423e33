"""Measured memory of published rows against what Megatron-DeepSpeed holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.validation.scoreboard import PUBLISHED, memory_scores, read
from shardwise.validation.scoreboard.memory import REDUCE_BUCKET, _stages, deepspeed_bytes

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
    """Nearly all too low: nvidia-smi counts what torch keeps for later, too (docs/prediction.md)."""
    (score,) = memory_scores([row(values) for values in ROWS])
    assert len(score.rows) == len(ROWS) and not score.skipped
    assert 0.03 < score.mean_abs_error < 0.1 and -0.1 < score.bias < -0.03
    assert max(abs(one.error) for one in score.rows) < 0.16


def test_an_optimizer_without_replicas_or_shards_is_known():
    """One replica under ZeRO-1, whose optimizer copies gradients all the same; and stage 0, which copies them twice."""
    alone = row((14400, 80, 8, 10, 1, 1, 75, "bf16")) | {"gpus": 80, "heads": 96, "kv_heads": 96, "head_dim": 150}
    unsharded = row((14336, 72, 8, 12, 4, 2, 72, "48 node contenders")) | {"zero_stage": 0}
    for one in memory_scores([alone, unsharded])[0].rows:
        assert abs(one.error) < 0.1


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

    def held(optimizer, dp=1) -> float:
        return deepspeed_bytes(model, [2, 2], 16, 1, 1, 1, dp, optimizer)

    table = 1000 * 64
    weights = 2 * 12 * 64**2 + table
    buckets = held("wide") - held("sharded") - (20 - 22) * weights - (4 - 2) * table
    assert buckets == 2 * REDUCE_BUCKET, "in fp32"
    assert held("whole") - held("sharded") == 2 * weights, "all gradients twice in fp32; or in 16 bits and in fp32"
    assert held("sharded", 4) - held("sharded", 8) == pytest.approx(18 * weights / 8)
    assert held("wide", 4) - held("wide", 8) == pytest.approx(12 * weights / 8)


def test_communicators_of_tp_ranks_are_there():
    """Two of them, beside which a model of a few megabytes is nothing."""
    one, two, eight = (deepspeed_bytes(get("tiny-gpt"), [4], 1, 1, 1, tp, 1, "sharded") for tp in (1, 2, 8))
    assert two - one == pytest.approx(2 * 544 * 2**20, rel=0.05)
    assert eight - one == pytest.approx(2 * 688 * 2**20, rel=0.05)


def test_stages_hold_all_layers():
    assert _stages(72, 12, False) == [6] * 12 and _stages(78, 12, False) == [7] * 11 + [1]
    assert _stages(70, 12, True) == [5, *[6] * 10, 5] and _stages(10, 1, True) == [10]
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            assert all(sum(_stages(layers, pp, tables)) == layers for tables in (False, True))


@from_table
def test_rows_that_are_not_scored_say_why(change, reason):
    (score,) = memory_scores([row(ROWS[0]) | change])
    assert not score.rows and score.mean_abs_error is None and score.bias is None
    assert reason in next(iter(score.skipped))


def test_rows_without_memory_are_not_asked():
    rows = [row for row in read(PUBLISHED) if row["source_id"] != "torchao"]
    assert memory_scores(rows) == []


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
