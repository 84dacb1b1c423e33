"""Models with experts on the scoreboard: settings of published runs, and scores with one model left out."""

from dataclasses import replace

import pytest

from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.predict.time import engine
from shardwise.validation.scoreboard import PUBLISHED, cases, mixture_scores, predict, read
from shardwise.validation.scoreboard.configuration import ENGINES, SCOPES, recipe_of, releases
from shardwise.validation.scoreboard.mixtures import HELD, coverage, fit_routed, with_experts

ROWS = [row for row in read(PUBLISHED) if row.get("moe_experts")]


@pytest.fixture(scope="module")
def predictions():
    return with_experts(predict(cases(ROWS)[0])[0])


def row(release: str, model: str) -> dict:
    return {"source": f"docs/performance-summary.md:1 [{release} NeMo Container]", "model": model}


def test_every_recipe_has_a_source_and_settings_that_there_are():
    for table in releases().values():
        assert table["source"]
        for run in table["runs"]:
            assert run["exchange"] in ENGINES and set(run.get("captured", ())) <= set(SCOPES)
            assert set(run) <= {"model", "devices", "narrow", "exchange", "overlap", "captured", "fused"}
    assert all(name in ENGINES.values() for name in ("megatron-bridge", "megatron-bridge-alltoall"))
    assert [engine(name).exchange for name in ENGINES.values()] == list(ENGINES)


def test_a_run_has_the_settings_of_its_release_or_of_the_last_one_that_lists_it():
    captured, overlap = "captured", "exchange_overlap"
    name, settings = recipe_of(row("25.11", "Qwen3_30B_a3B"), "GB200-NVL72", True)
    assert (name, settings[captured], settings[overlap]) == ("megatron-bridge", ("router",), False)
    assert recipe_of(row("26.04.01", "Qwen3_30B_a3B"), "GB200-NVL72", True)[1] == settings
    for release in ("26.06", "26.06.01", "26.08"):
        newer = recipe_of(row(release, "Qwen3_30B_a3B"), "GB200-NVL72", True)[1]
        assert newer[captured] == SCOPES and newer[overlap] and newer["fused_experts"]
    # Products in 16 bits kept theirs.
    assert recipe_of(row("26.08", "Qwen3_30B_a3B"), "GB200-NVL72", False)[1][captured] == ("attention", "router")
    assert recipe_of(row("26.04", "Qwen3_235B_a22B"), "B300", True)[0] == "megatron-bridge-alltoall"
    assert recipe_of(row("26.04.01", "Qwen3_235B_a22B"), "B300", True)[0] == "megatron-bridge"


def test_a_run_without_a_recipe_is_assumed_to_be_the_profiles():
    assert recipe_of(row("25.09", "Kimi_K2"), "GB300-NVL72", True) is None
    assert recipe_of({"source": "somewhere", "model": "Qwen3_30B_a3B"}, "B200", True) is None
    stated = next(one for one in ROWS if "exchange" not in one)
    asked = cases([{**stated, "source": "github NVIDIA-NeMo/Megatron-Bridge", "notes": ""}])[0][0]
    assert asked.engine == "megatron-bridge" and not asked.recipe
    assert any("exchange of tokens not stated" in words for words in asked.assumed)


def test_what_a_row_states_counts_first():
    stated = {**row("26.08", "Qwen3_30B_a3B"), "exchange": "rows", "overlap": True, "captured": ["router"]}
    name, settings = recipe_of(stated, "GB200-NVL72", True)
    assert name == "megatron-bridge-alltoall"
    assert settings == {"exchange_overlap": True, "captured": ("router",), "fused_experts": False}
    with pytest.raises(UserError, match="exchange must be one of tokens, rows, not 'pigeons'"):
        recipe_of({**stated, "exchange": "pigeons"}, "B200", True)
    with pytest.raises(UserError, match="captured must be a list of"):
        recipe_of({**stated, "captured": ["loss"]}, "B200", True)


def test_runs_of_other_settings_are_other_configurations():
    one = next(row for row in ROWS if row.get("exchange") == "tokens")
    assert len(cases([one, {**one, "exchange": "rows"}, one])[0]) == 2


def test_published_pairs_of_runs_are_ordered_as_they_were_measured(predictions):
    """The same run with and without the exchange beside another micro-batch, by HybridEP and by an all-to-all."""
    pairs = [one for one in predictions if one.case.row.get("exchange") and one.case.source == "megatron-bridge"]
    assert len(pairs) == 4
    measured = sorted(pairs, key=lambda one: one.measured)
    assert max(abs(one.error) for one in pairs) < 0.22
    off, on = ([one for one in measured if one.case.recipe["exchange_overlap"] is overlap] for overlap in (False, True))
    assert [one.case.engine for one in on] == [one.case.engine for one in off] == list(ENGINES.values())
    # The all-to-all of rows is slower, and gains from running beside computation.
    assert off[1].seconds > 1.5 * off[0].seconds
    assert on[1].seconds < off[1].seconds


def test_a_models_range_is_fitted_without_it(predictions):
    scores = mixture_scores(predictions)
    assert [score.model for score in scores] == [
        "Qwen3_235B_a22B", "GPT OSS 120B", "Qwen3_30B_a3B", "Mixtral 8x7B", "all",
    ]  # fmt: skip
    everything = scores[-1]
    assert everything.rows == sum(score.rows for score in scores[:-1]) == len(predictions)
    assert everything.mean_abs_error < 0.15
    # A model far off leaves the others' range as it is, and widens that of all together.
    far = [replace(one, measured=3 * one.measured) if "GPT" in one.case.model.name else one for one in predictions]
    worse = {score.model: score for score in mixture_scores(far)}
    assert worse["GPT OSS 120B"].coverage == 0
    assert worse["GPT OSS 120B"].routed == next(s.routed for s in scores if s.model == "GPT OSS 120B")
    assert worse["Mixtral 8x7B"].routed >= next(s.routed for s in scores if s.model == "Mixtral 8x7B")
    assert mixture_scores([]) == []


def test_the_fitted_uncertainty_is_the_least_that_holds_enough_rows(predictions):
    from shardwise.predict.time.constants import uncertainty

    sigma = uncertainty()
    routed = fit_routed(predictions, sigma)
    assert coverage(predictions, {**sigma, "routed": routed}) >= HELD
    assert routed == 0.01 or coverage(predictions, {**sigma, "routed": routed - 0.01}) < HELD


def test_the_command_prints_one_line_for_each_model(capsys, tmp_path):
    assert main(["validate", "--experts"]) == 0
    out = capsys.readouterr().out
    for model in ("Qwen3_235B_a22B", "GPT OSS 120B", "Mixtral 8x7B", "all"):
        assert model in out
    assert main(["validate", "--experts", "--json"]) == 0
    assert '"coverage"' in capsys.readouterr().out
    (tmp_path / "none.json").write_text("[]")
    assert main(["validate", str(tmp_path / "none.json"), "--experts"]) == 2
    assert "no row of these tables trains a model with experts" in capsys.readouterr().err
