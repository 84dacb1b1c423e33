"""What a turn moves: the rows of every strategy, what stays in the slots, and the ratio between strategies."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from harness.strategies import models
from quoted.tokens import summed_bytes
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout
from shardwise.layout.serving import check_generation, plan_of, sequences_of
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.config import Experts
from shardwise.model.parameters import count_parts
from shardwise.planner.strategies import decode_round
from shardwise.predict.traffic.ring_volume import kind_of, payload, ring_volume
from shardwise.predict.traffic.serving import ForwardPass, balanced, mixtures_of, steady_gathers, turn_ledger
from shardwise.schedule import build
from shardwise.schedule.network import Network
from shardwise.schedule.price import price

MODEL = ModelConfig("m", vocab=50, hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, max_positions=64)


def rows(text: str, tokens: int = 1, rows_wanted: int = 1, stage: int = 0, model: ModelConfig = MODEL):
    plan = plan_of(model, Layout.parse(text), stage)
    return turn_ledger(plan, ForwardPass("decode", tokens, rows_wanted), steady_gathers(plan))


def test_one_rank_and_replicas_move_nothing():
    assert not [row for row in rows("dp=1") + rows("dp=3") if kind_of(row) != "other"]


def test_tensor_parallel_sums_twice_a_block_and_gathers_padded_logits():
    found = {(row.op, row.unit): row for row in rows("tp=4", tokens=3, rows_wanted=2)}
    assert all(found["all_reduce", f"blocks.{i}"].count == 2 for i in range(4))
    assert {row.elements for row in found.values() if row.op == "all_reduce"} == {3 * 32, 2}  # control: two numbers
    assert ("all_reduce", "head") not in found and found["all_reduce", "embedding"].count == 1
    assert found["all_gather_into", "logits"].elements == 2 * 52  # 50 tokens, padded to four equal pieces
    blocks = [row for row in found.values() if row.unit.startswith("blocks.")]
    assert sum(row.payload_bytes for row in blocks) == summed_bytes(MODEL, 3)


def test_a_turn_without_logits_gathers_none():
    assert not [row for row in rows("tp=2", tokens=3, rows_wanted=0) if row.unit == "logits"]


def test_a_pipeline_hands_one_vector_along():
    ends = [rows("pp=3", tokens=5, stage=stage) for stage in range(3)]
    stream = [[(row.op, row.unit) for row in end if row.unit.startswith("stage ")] for end in ends]
    assert stream == [[("send", "stage 1")], [("recv", "stage 1"), ("send", "stage 2")], [("recv", "stage 2")]]
    assert {row.elements for end in ends for row in end if row.unit.startswith("stage ")} == {5 * 32}


def gathered(plan) -> tuple[str, ...]:
    return tuple(gather.unit for gather in steady_gathers(plan))


def test_gathers_of_the_turns_after_the_first():
    plan = plan_of(MODEL, Layout.parse("dp=2,zero=3"))
    blocks = tuple(f"blocks.{i}" for i in range(4))
    assert gathered(plan) == ("embedding", *blocks, "head")
    tied = plan_of(MODEL.replace(tied=True), Layout.parse("dp=2,zero=3"))
    # The table has a slot of its own, and stays.
    assert gathered(tied) == (*blocks, "head")
    assert gathered(plan_of(MODEL, Layout.parse("tp=2"))) == ()


def test_what_is_in_its_slot_stays():
    """One block alone is the only one of the inner slot: it is gathered once."""
    plan = plan_of(MODEL.replace(layers=1), Layout.parse("dp=2,zero=3"))
    assert gathered(plan) == ("embedding", "head")


@given(models().filter(lambda model: model.layers > 1), st.sampled_from([2, 4]), st.integers(1, 3))
def test_gathering_over_tensor_parallel_is_the_blocks_over_4Ld_exactly(model, ranks, tokens):
    layouts = [Layout.parse(text) for text in (f"dp={ranks},zero=3", f"tp={ranks}")]
    try:
        check_generation(layouts[1], model)
    except UserError:
        return
    gathering, tensor = (decode_round(model, layout, tokens).volume.blocks for layout in layouts)
    assert gathering / tensor * tokens == Fraction(count_parts(model)[1], 4 * model.layers * model.hidden)


def test_llama_3_70b_on_eight_ranks():
    model = get("llama-3-70b")
    gathering, tensor = (decode_round(model, Layout.parse(text)).volume for text in ("dp=8,zero=3", "tp=8"))
    assert gathering.blocks / tensor.blocks == Fraction(count_parts(model)[1], 4 * 80 * 8192) == Fraction(52225, 2)
    assert 25_000 < gathering.total / tensor.total < 26_000
    assert float(gathering.total) == pytest.approx(123.5e9, rel=1e-3)


def test_ring_volume_is_what_the_ring_sends():
    plan = plan_of(MODEL, Layout.parse("tp=4"))
    ledger = turn_ledger(plan, ForwardPass.decode(8), ())
    nbytes = sum(row.payload_bytes for row in ledger if row.op == "all_reduce" and row.dtype == "bfloat16")
    sums = price(build("all-reduce", "ring", 4), Network.flat(4, 0.0, 1.0), nbytes).bytes_sent
    pieces = payload(ledger)["edges"] - 8 * 32 * 2  # the logits, without the embedding's sum
    gathered = price(build("all-gather", "ring", 4), Network.flat(4, 0.0, 1.0), pieces).bytes_sent
    found = ring_volume(ledger, plan)
    assert float(found.blocks + found.edges) == pytest.approx(sums + gathered)


def test_sequences_are_shared_out():
    assert sequences_of(Layout.parse("dp=4,zero=3"), 9) == 3 and sequences_of(Layout.parse("tp=4"), 9) == 9
    assert sequences_of(Layout.parse("dp=4"), 1) == 1


@from_table
def test_layouts_that_are_not_for_generation(text, words):
    with pytest.raises(LayoutError, match=words):
        check_generation(Layout.parse(text), MODEL)


def test_dropout_is_no_objection():
    check_generation(Layout.parse("tp=4"), get("gpt2"))


def test_too_few_devices():
    with pytest.raises(LayoutError, match="needs 4 ranks, but there are 2"):
        check_generation(Layout.parse("tp=4"), MODEL, 2)


def test_a_round_of_a_pipeline_has_a_turn_for_each_stage():
    """Control goes round in empty turns, too; the stream in those that have a sequence."""
    one, six = (decode_round(MODEL, Layout.parse("pp=3"), sequences) for sequences in (1, 6))
    assert one.volume.blocks == 2 * MODEL.hidden and six.volume.blocks == 6 * one.volume.blocks
    assert one.volume_of_token.blocks == six.volume_of_token.blocks and six.made == 6
    assert one.payload["other"] == six.payload["other"] == 3 * 2 * 8  # from the first stage, which chooses no tokens
    shared = decode_round(MODEL, Layout.parse("dp=2"), 5)
    assert shared.made == 3 and shared.volume.total == 0


MIXED = MODEL.replace(experts=Experts(8, 2, 48, shared=1, dense_layers=1))


def test_experts_inside_tensor_parallelism_move_what_its_sums_do():
    """Attention and feed-forward part are summed once each, however the experts are split, shared ones among them."""
    one = rows("tp=4", tokens=3, model=MIXED)
    assert one == rows("tp=4,ep=4", tokens=3, model=MIXED) == rows("tp=4,ep=2", tokens=3, model=MIXED)
    assert one == rows("tp=4", tokens=3)


def test_rows_to_experts_of_other_replicas_go_there_and_back():
    plan = plan_of(MIXED, Layout.parse("dp=4,ep=4"))
    pairs = balanced(plan, 6, 24)
    assert list(pairs) == mixtures_of(plan) == ["blocks.1", "blocks.2", "blocks.3"]
    ledger = turn_ledger(plan, ForwardPass.decode(6), (), True, pairs)
    found = {(row.unit, row.dtype, row.elements): row.count for row in ledger if row.op == "all_to_all"}
    each = {(unit, "int64", 8): 1 for unit in pairs} | {(unit, "bfloat16", 6 * 2 * 32): 2 for unit in pairs}
    assert found == each and {row.axes for row in ledger if row.op == "all_to_all"} == {"ep"}
    # With two places in tensor parallelism, half of the pairs are a rank's, of two replicas and no more.
    both = plan_of(MIXED, Layout.parse("dp=2,tp=2,ep=4"))
    half = turn_ledger(both, ForwardPass.decode(6), (), True, balanced(both, 6, 12))
    of_pairs = {(row.axes, row.dtype, row.elements) for row in half if row.op == "all_to_all"}
    assert of_pairs == {("ep-across", "int64", 4), ("ep-across", "bfloat16", 6 * 32)}


@pytest.mark.parametrize(("ranks", "sequences"), [(2, 1), (4, 1), (4, 4), (4, 20)])
def test_bytes_of_experts_over_tensor_parallelism(ranks, sequences):
    """A token goes to its k experts and back in each mixture; each token of a rank costs what it receives, too."""
    spread, tensor = (
        decode_round(MIXED, Layout.parse(text), sequences).volume_of_token.blocks
        for text in (f"dp={ranks},ep={ranks}", f"tp={ranks}")
    )
    width, share = 2 * MODEL.hidden, Fraction(ranks - 1, ranks)
    busiest = -(-sequences // ranks)
    rows_of_rank = 2 * (busiest + Fraction(sequences, ranks)) / sequences
    counts = Fraction(8 * 8, sequences)
    assert spread == 3 * share * (rows_of_rank * width + counts)
    assert tensor == 4 * 2 * 2 * share * width
