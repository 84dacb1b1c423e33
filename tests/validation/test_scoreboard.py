import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.model.flops import hardware_flops_per_token, training_flops_per_token
from shardwise.model.parameters import count
from shardwise.validation.scoreboard import PUBLISHED, cases, predict, read, scores
from shardwise.validation.scoreboard.configuration import model_of

ROWS = read(PUBLISHED)
MOST = table(__file__, "MOST")
"""Source -> mean absolute error that its few rows here must stay below. Of torchao's rows half are of devices without
measured kernels (MI300X, B200)."""


@pytest.fixture(scope="module")
def scored():
    asked, skipped = cases(ROWS)
    predictions, refused = predict(asked)
    return predictions, scores(predictions, [*skipped, *refused])


def test_every_row_has_a_citation_and_is_scored(scored):
    predictions, found = scored
    assert all(row["source"] for row in ROWS)
    fitted = [skipped for score in found for skipped in score.skipped if "are fitted on it" in skipped]
    assert len(predictions) == len(ROWS) - 2 and len(fitted) == 1, "MI300X's two rows are no evidence"
    assert {score.source for score in found} == set(MOST)


def test_own_table_stays_as_good(scored):
    for score in scored[1]:
        assert score.mean_abs_error < MOST[score.source], score


def test_ranges_hold_most_rows(scored):
    predictions, _ = scored
    inside = sum(prediction.inside for prediction in predictions)
    assert inside >= 0.6 * len(predictions)
    assert all(prediction.range.low < prediction.seconds < prediction.range.high for prediction in predictions)


def test_duplicates_count_once():
    row = next(row for row in ROWS if row["source_id"] == "korthikanti22")
    slower = {**row, "iter_time_s": 3 * row["iter_time_s"]}
    asked, skipped = cases([row, slower])
    assert len(asked) == 1
    assert asked[0].measured == pytest.approx(2 * row["iter_time_s"])
    assert [skip.reason for skip in skipped] == ["duplicate of the same configuration"]
    other = {**row, "gbs": 2 * row["gbs"]}
    assert len(cases([row, other])[0]) == 2


@from_table
def test_rows_that_cannot_be_scored_say_why(change, reason):
    row = next(row for row in ROWS if row["source_id"] == "korthikanti22")
    asked, skipped = cases([{**row, **change}])
    assert not asked
    assert reason in skipped[0].reason
    score = scores([], skipped)[0]
    assert (score.rows, score.mean_abs_error, sum(score.skipped.values())) == (0, None, 1)


def test_tables_that_are_none(tmp_path):
    for text, words in (
        ("{", "is not JSON"),
        ("{}", "must be a JSON list"),
        ('[{"gpu": "H100"}]', "row 0 has no source_id"),
    ):
        (tmp_path / "table.json").write_text(text)
        with pytest.raises(UserError, match=words):
            read(tmp_path / "table.json")
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path / "none.json")


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({key for row in ROWS for key in row} - {"source_id"})),
        st.none() | st.integers(-3, 10**9) | st.text(max_size=5) | st.booleans(),
        max_size=4,
    ),
    st.sampled_from(ROWS),
)
def test_any_row_is_scored_or_skipped(changes, row):
    asked, skipped = cases([{**row, **changes}])
    assert len(asked) + len(skipped) == 1
    json.dumps([skip.reason for skip in skipped])


def test_rates_by_a_known_convention_are_measurements():
    row = next(row for row in ROWS if row["source_id"] == "llm-foundry")
    model, seconds = model_of(row, []), row["iter_time_s"]
    tokens = row["gbs"] * row["seq"] / row["gpus"]
    stated = {key: value for key, value in row.items() if key not in ("iter_time_s", "tokens_per_s_per_gpu")}

    def measured(**told) -> float:
        return cases([{**stated, "tflops_per_gpu": None, **told}])[0][0].measured

    def tera(flops: float) -> float:
        return flops * tokens / seconds / 1e12

    assert measured(tokens_per_s_per_gpu=tokens / seconds) == pytest.approx(seconds)
    for convention, flops in (
        ("model FLOPs, causal attention counted half", training_flops_per_token(model, row["seq"])),
        (
            "model FLOPs, full attention counted; no step time",
            training_flops_per_token(model, row["seq"], causal=False),
        ),
        ("recompute counted (about 8N per token)", hardware_flops_per_token(model, row["seq"], "full", causal=False)),
    ):
        assert measured(tflops_per_gpu=tera(flops), tflops_convention=convention) == pytest.approx(seconds)
    old = measured(tflops_per_gpu=tera(8 * count(model)), tflops_convention="?", notes="TFLOPs by old formula")
    assert old == pytest.approx(seconds)
    for told, reason in (
        ({"tflops_per_gpu": 100.0, "tflops_convention": "marketing"}, "a convention that is not known: marketing"),
        ({"tokens_per_s_per_gpu": -3.0}, "tokens_per_s_per_gpu must be a positive number"),
        ({}, "no measured time of a step, tokens/s or TFLOP/s"),
    ):
        asked, skipped = cases([{**stated, "tflops_per_gpu": None, **told}])
        assert not asked and reason in skipped[0].reason


@pytest.mark.parametrize(
    ("network", "words"),
    [("8x200Gb/s HDR IB per node", ""), ("carrier pigeons", "network 'carrier pigeons' not known: InfiniBand HDR200")],
)
def test_a_network_that_is_not_known_is_among_what_was_assumed(network, words):
    row = next(row for row in ROWS if row["source_id"] == "korthikanti22" and row["gpus"] > 8)
    before = cases([{**row, "inter_node": "8x200Gb/s HDR IB per node"}])[0][0]
    one = cases([{**row, "inter_node": network}])[0][0]
    more = [told for told in one.assumed if told not in before.assumed]
    assert (len(more) == 1 and words in more[0]) if words else more == []


SERVED = {
    "source_id": "served", "source": "a server (tensorrt)", "phase": "serve", "model": "Llama 3.1 8B", "hidden": 4096,
    "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336, "vocab": 128256, "gated_ffn": True,
    "gpu": "H100-80GB-SXM", "gpus": 1, "tp": 1, "pp": 1, "precision": "FP8", "isl": 200, "osl": 200,
}  # fmt: skip
"""A server's row without what it measured."""


def test_every_measurement_of_a_serving_row_is_a_question():
    row = SERVED | {
        "concurrency": 25, "ttft_ms": 36.34, "itl_ms": 5.19, "latency_ms": 1069.0, "tokens_per_s_total": 4678.88,
    }  # fmt: skip
    asked, skipped = cases([row])
    assert [one.kind for one in asked] == ["first token", "each token", "answer", "rate"] and not skipped
    found = {one.case.kind: one for one in predict(asked)[0]}
    first, each, answer = (found[kind].seconds for kind in ("first token", "each token", "answer"))
    assert first + 199 * each == pytest.approx(answer)
    assert found["rate"].seconds == pytest.approx(answer / (25 * 200))
    assert all(abs(one.error) < 0.35 for one in found.values())
    assert all(sum(one.parts.values()) == pytest.approx(one.seconds) for one in found.values())


def test_a_batch_without_a_concurrency_is_one():
    one, other = (cases([SERVED | {key: 8, "itl_ms": 5.0}])[0][0] for key in ("batch", "concurrency"))
    assert (one.clients, one.kind) == (other.clients, other.kind) == (8, "each token")


def test_ranks_with_sequences_of_their_own():
    experts = {"moe_experts": 128, "moe_topk": 8, "expert_ffn": 1536, "ffn": 1536, "layers": 94, "kv_heads": 4}
    row = SERVED | experts | {"gpus": 8, "tp": 8, "ep": 8, "tokens_per_s_total": 15456, "isl": 1000, "osl": 1000}
    (apart,), (together,) = (cases([row | {"attention_dp": dp}])[0] for dp in (True, False))
    assert (apart.replicas, apart.serving.tp, apart.serving.ep, apart.serving.expert_tp) == (8, 1, 8, 1)
    assert (together.replicas, together.serving.tp, together.serving.ep, together.serving.expert_tp) == (1, 8, 8, 1)
    one = predict([apart])[0][0]
    assert one.parts["decode experts"] > 0 and abs(one.error) < 0.5


@pytest.mark.parametrize("key", ["ttft_ms", "itl_ms", "latency_ms"])
@pytest.mark.parametrize("value", [0, -1, "fast", True, float("inf")])
def test_measurements_that_are_none_are_skipped_with_a_reason(key, value):
    asked, skipped = cases([SERVED | {"concurrency": 4, key: value}])
    assert not asked and "no measured" in skipped[0].reason


@pytest.mark.parametrize(
    ("prompt", "output", "pp", "sequences", "tokens"),
    [(1000, 1000, 1, 1280, 2304), (128, 128, 1, 4096, 8192), (20000, 2000, 1, 96, 20096), (2048, 128, 2, 1024, 17408)],
)
def test_settings_of_a_benchmark(prompt, output, pp, sequences, tokens):
    """Beside Llama 3.1 8B in FP8, 95% of the memory of an H200 holds 2,069,000 tokens, and of two 4,254,000."""
    row = SERVED | {"gpu": "H200", "gpus": pp, "pp": pp, "isl": prompt, "osl": output, "tokens_per_s_total": 1000.0}
    software = cases([row])[0][0].software
    assert (software.most_sequences, software.most_tokens) == (sequences * pp, tokens)
    assert software.graph_sizes[-1] == sequences and software.graph_sizes[:3] == (1, 2, 4)
    assert not cases([row | {"concurrency": 8}])[0][0].software.graph_sizes  # a server's settings are its own


def test_a_benchmark_pays_for_padded_graphs():
    row = SERVED | {"gpu": "H200", "isl": 500, "osl": 2000, "tokens_per_s_total": 20770}
    case = cases([row])[0][0]
    padded, exact = (predict([each])[0][0] for each in (case, replace(case, recipe={**case.recipe, "graph_sizes": ()})))
    assert padded.seconds > exact.seconds and abs(padded.error) < 0.1
