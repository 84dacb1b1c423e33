"""`shardwise generate --compare`: strategies side by side, predicted without torch or weights, or as they ran here."""

import json
import subprocess
import sys

import pytest

from harness.huggingface import pretrained
from harness.today import EVERYTHING
from shardwise.cli import compare_local
from shardwise.cli.main import main
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import count_parts
from shardwise.report.step_report import Bytes
from shardwise.serving.job import ServingJob
from shardwise.serving.recording import StepRecord

NODE = ["generate", "llama-3-70b", "--cluster", "8xH100"]


def test_llama_3_70b_on_eight_h100(capsys):
    assert main([*NODE, "--compare"]) == 0
    out = capsys.readouterr().out
    for words in (
        "tp=8", "dp=8,zero=3", "pp=8", "time of a token", "80% range", "embedding, head, logits", "last token against",
        "a training step of 8 x 8,192 tokens", "a token sends 26,112 times the bytes for the blocks",
        "disappears behind its arithmetic",
    ):  # fmt: skip
        assert words in out


def test_json_has_the_same(capsys):
    assert main([*NODE, "--compare", "tp=4", "zero=3,dp=4", "pp=4", "--prompt-tokens", "500", "--max-new-tokens",
                 "1000", "--batch", "4", "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert [one["layout"] for one in found["strategies"]] == ["tp=4", "dp=4,zero=3", "pp=4"]
    (ratio,) = found["ratios"]
    assert ratio["blocks"] == pytest.approx(26112.5 / 4) and ratio["fewer_bytes_from_tokens"] == 26112.5
    for one in found["strategies"]:
        token = one["token"]
        assert token["first"]["seconds"] <= token["middle"]["seconds"] <= token["last"]["seconds"]
        assert token["middle"]["low"] < token["middle"]["seconds"] < token["middle"]["high"]
        assert one["bytes"]["cache_at_end"] > one["bytes"]["cache_after_prompt"]
    assert (found["prompt_tokens"], found["max_tokens"], found["batch"]) == (500, 1000, 4)


def test_an_option_of_the_comparison_asks_for_it(capsys):
    assert main([*NODE, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["predicted"]["strategies"]) == 3


def test_set_changes_the_model_that_is_compared(capsys):
    times = []
    for words in ([], ["--set", "layers=40"], ["--set=layers=40", "--set", "ffn=1024"]):
        assert main([*NODE, "--compare", "tp=8", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["predicted"]
        times.append(found["strategies"][0]["token"]["middle"]["seconds"])
    assert times[0] > 1.8 * times[1] > 1.8 * times[2]


def test_prediction_needs_no_torch():
    code = (
        "import sys; from shardwise.cli.main import main; "
        f"code = main({[*NODE, '--compare', 'tp=8', '--json']!r}); sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def model_in(folder) -> ModelConfig:
    return from_huggingface(folder)


@pytest.fixture
def compare_here(ranks_command, tmp_path):
    """The output of `shardwise generate FOLDER --compare ...` for a small model."""
    pretrained("llama").save_pretrained(tmp_path)

    def run(*words: object) -> str:
        code, out, err = ranks_command("generate", tmp_path, "--compare", *words)
        assert code == 0, err
        return out

    return run


def test_sequences_that_begin_and_end_apart_count_where_all_are_decoded(compare_here):
    sizes = ("--batch", 3, "--prompt-tokens", 7, "--chunk", 3, "--max-new-tokens", 5)
    (one,) = json.loads(compare_here("zero=3,dp=2", *sizes, "--json"))["measured"]["strategies"]
    assert [len(tokens) for tokens in one["tokens"]] == [5, 5, 5]
    assert one["ring_bytes_of_a_token"] == one["predicted_ring_bytes_of_a_token"]


def test_what_one_or_two_tokens_do_not_tell_is_blank(compare_here):
    (one,) = json.loads(compare_here("dp=1", "--max-new-tokens", 2, "--json"))["measured"]["strategies"]
    assert (
        one["growth"] is None and min(one[name] for name in ("token_seconds", "tokens_per_second", "cache_bytes")) > 0
    )
    assert one["ring_bytes_of_a_token"] == one["predicted_ring_bytes_of_a_token"]
    out = compare_here("dp=1", "--max-new-tokens", 1)
    assert "1 token each" in out and "dp=1: no step decoded all sequences" in out
    rows = {line.strip() for line in out.splitlines()}
    assert rows >= {"tokens/s, all sequences", "time of a token (median)", "cache of a rank before the last tokens"}


def note(tokens: int, phase: str = "decode") -> StepRecord:
    return StepRecord(1, phase, tokens, tokens, 0.0, 0.0, 0, Bytes(), (), ())


def test_full_rounds_are_those_in_which_every_sequence_has_one_more_token(tmp_path):
    """Of a pipeline as many turns as it has stages; of ranks in step all together; of replicas the busiest."""
    model = ModelConfig("m", vocab=50, hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, max_positions=64)

    def rounds(text: str, sequences: int, *turns: list[StepRecord]) -> list[int]:
        job = ServingJob(model, Layout.parse(text), str(tmp_path))
        return [
            len(compare_local._full_rounds(job, dict(enumerate(turns)), rank, sequences)) for rank in range(len(turns))
        ]

    staged = [note(1, "prefill"), note(2), note(1), note(2), note(1), note(1), note(1), note(1)]
    assert rounds("pp=2", 3, staged, staged) == [2, 2]
    assert rounds("dp=2,zero=3", 3, [note(1), note(2), note(2)], [note(1, "prefill"), note(1), note(0)]) == [1, 1]
    assert rounds("dp=2", 3, [note(2), note(2), note(1)], [note(1), note(1)]) == [2, 2]
    assert rounds("tp=2", 2, [note(1), note(2, "prefill")], [note(1), note(2, "prefill")]) == [0, 0]


def test_what_runs_here_moves_what_was_predicted(compare_here, tmp_path):
    layouts = ["zero=3,dp=2", "tp=2"] if EVERYTHING else ["zero=3,dp=2"]
    words = ("--precision", "fp32", "--tokens", "1,2,3,4,5", "--max-new-tokens", 6, "--cluster", "8xH100", "--json")
    told = json.loads(compare_here(*layouts, *words))
    gathering, *rest = told["measured"]["strategies"]
    assert (told["predicted"]["prompt_tokens"], told["predicted"]["max_tokens"]) == (5, 6)
    assert told["predicted"]["strategies"][0]["ring_bytes_of_a_token"] == gathering["ring_bytes_of_a_token"]
    for one in (gathering, *rest):
        assert one["tokens"] == gathering["tokens"] and len(one["tokens"][0]) == 6
        assert one["ring_bytes_of_a_token"] == one["predicted_ring_bytes_of_a_token"]
        assert one["token_seconds"] > 0 and one["tokens_per_second"] > 0 and one["cache_bytes"] > 0
    model = model_in(tmp_path)
    moved = gathering["ring_bytes_of_a_token"]["blocks"]
    assert moved == count_parts(model)[1] * 4 / 2
    for tensor in rest:
        share = count_parts(model)[1] / (4 * model.layers * model.hidden)
        assert moved / tensor["ring_bytes_of_a_token"]["blocks"] == share
