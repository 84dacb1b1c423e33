"""`shardwise generate`: prompts in, text out; one line for what cannot be."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from harness import forked
from harness.cases import from_table
from harness.huggingface import pretrained
from harness.processes import alive, children
from harness.today import EVERYTHING
from shardwise.cli import compare_local
from shardwise.cli import generate as generating
from shardwise.cli.main import main
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DP
from shardwise.model import ModelConfig
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import count_parts
from shardwise.report import StepReport
from shardwise.report.step_report import Bytes
from shardwise.serving.job import ServingJob
from shardwise.serving.messages import Finished, Sampling, Token
from shardwise.serving.recording import StepRecord, notes_file, reports
from shardwise.serving.service import Service
from shardwise.serving.text import Text

EVERY = ["dp=2,zero=3", "pp=2"]
TEXT = "the quick brown fox jumps over the lazy dog; " * 20


def _environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "OMP_NUM_THREADS": "1"}


def generate(*args: object, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return forked.shardwise("generate", *map(str, args), environment=_environment(), timeout=timeout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    pretrained("llama", vocab_size=300, max_position_embeddings=256).save_pretrained(root / "tiny")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(root / "tiny" / "tokenizer.json"))
    return root / "tiny"


def expected(folder: Path, ids: list[int], count: int) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        whole = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens: list[int] = whole[0, len(ids) :].tolist()
    return tokens


def test_answers_are_those_of_transformers_as_text_and_as_json(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("the quick").ids
    tokens = expected(folder, ids, 24)
    whole = tokenizer.decode(tokens)
    common = ("--precision", "fp32", "--max-new-tokens", 24)
    shown = generate(folder, "--prompt", "the quick", "--layout", "tp=2", *common)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.rstrip("\n") == whole.rstrip("\N{REPLACEMENT CHARACTER}\n")
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    prompts = ("--prompt", "the quick", "--tokens", ",".join(map(str, ids)), "--stop", stop)
    both = generate(folder, *prompts, *common, "--chunk", 2, "--json")
    result: dict[str, Any] = json.loads(both.stdout)
    assert result["layout"] == "precision=fp32"
    for answer in result["answers"]:
        assert answer["text"] == whole[: whole.index(stop)] and answer["reason"] == "stop"
        assert answer["prompt_tokens"] == len(ids) and answer["tokens"] == tokens[: len(answer["tokens"])]


def test_tokens_that_come_after_a_stop_string_are_no_part_of_the_answer(folder: Path) -> None:
    text = Text.open(folder)

    class Late:
        """Has chosen all tokens before it hears of a cancel."""

        def submit(self, prompt: list[int], sampling: Sampling, sink: Any) -> int:
            for token in text.encode("fox;dog"):
                sink(Token(1, token, -1.0))
            sink(Finished(1, "cancelled"))
            return 1

        def cancel(self, number: int) -> None: ...

    answer = generating._Answer([1], text.stream([";"]))
    generating._generate(Late(), [answer], Sampling(), (), quiet=True)  # type: ignore[arg-type]
    assert answer.text == "fox" and answer.tokens == text.encode("fox;") and answer.reason == "stop"
    assert len(answer.logprobs) == len(answer.tokens)


@pytest.mark.parametrize("layout", EVERY if EVERYTHING else EVERY[:1])
def test_reports_of_every_turn(folder: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "reports"
    done = generate(
        folder, "--tokens", ",".join(map(str, range(1, 11))), "--layout", layout, "--precision", "fp32",
        "--chunk", 6, "--max-new-tokens", 4, "--report", out, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [path.name for path in sorted(out.iterdir())]
    told = [StepReport.read(out / name) for name in names]
    assert [name.split("-")[2] for name in names] == ["prefill.json"] * 2 + ["decode.json"] * 3
    assert [report.workload["tokens"] for report in told] == [6, 4, 1, 1, 1]
    for report in told:
        assert sorted(rank for role in report.roles for rank in role.ranks) == [0, 1]
        rows = {row.unit for role in report.roles for row in role.ledger}
        assert rows >= ({"control", "blocks.0", "blocks.1"} if "zero" in layout else {"control", "stage 1"})
        assert all(row.wait_s is not None for role in report.roles for row in role.transport)
        assert report.time and all(role.bytes.parameters and role.bytes.cache for role in report.roles)
        assert not any(role.bytes.other for role in report.roles)
    steady = [[(role.ranks, role.ledger) for role in report.roles] for report in told[2:]]
    assert steady[1] == steady[2]
    refused(capsys, "not empty", folder, "--tokens", 1, "--report", out)


@from_table
def test_a_turn_has_the_tokens_and_rows_of_each_data_rank_once(
    tmp_path: Path, layout: str, prompts: str, expected: tuple[int, int]
) -> None:
    model = ModelConfig("m", vocab=50, hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, max_positions=64)
    job = ServingJob(model, Layout.parse(layout), str(tmp_path), prompts=prompts)
    mesh = Mesh.of(job.layout, model)
    for rank in range(job.layout.ranks):
        tokens = 2 if prompts == "own" and mesh.index(DP, rank) else 3
        note = StepRecord(1, "prefill", tokens, 1, 0.5, 0.0, 0, Bytes(), (), ())
        notes_file(tmp_path, rank).write_text(json.dumps(note.to_json()) + "\n")
    _, report = next(reports(job, tmp_path))
    assert [report.workload["tokens"], report.workload["rows"]] == expected


@from_table
def test_mistakes_are_one_line(
    folder: Path, args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, words, folder, *args)


def refused(capsys: pytest.CaptureFixture[str], words: str, *args: object) -> None:
    """The command says these words on one line and ends with 2; no rank is started for it."""
    assert main(["generate", *map(str, args)]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and not said.out


def test_folders_that_cannot_be_read_are_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    refused(capsys, "has no tokenizer.json", tmp_path, "--prompt", "x")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    refused(capsys, "cut short", tmp_path, "--tokens", "1")
    refused(capsys, "no such folder", tmp_path / "nowhere", "--tokens", "1")


def test_the_bubble_of_pretended_stages_is_laid_beside_the_simulated_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = generate(folder, "--layout", "pp=2", "--chunk", 32, "--emulate", "3ms", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["stages"], found["chunks"], len(found["bubbles"])) == (2, 8, 5)
    measured, simulated = found["measured"], found["simulated"]
    assert simulated["busy_s"] == pytest.approx([0.024, 0.024]) and found["hop_s"] > 0
    assert simulated["bubble_over_ideal"] == pytest.approx(1 / 8 + found["hop_s"] / 0.024)
    assert all(busy >= 0.9 * 0.024 for busy in measured["busy_s"]) and measured["makespan_s"] >= 9 * 0.003 * 0.9
    assert found["ratio"] == measured["bubble_over_ideal"] / simulated["bubble_over_ideal"]
    shown = generate(folder, "--layout", "pp=2", "--tokens", "1,2,3", "--chunk", 1, "--emulate", "1ms").stdout
    assert "3 chunks of 1 tokens" in shown and "simulated; ratio" in shown
    refused(capsys, "measures one pipeline", folder, "--layout", "tp=2", "--emulate", "1ms")
    refused(capsys, "such as 20ms", folder, "--layout", "pp=2", "--emulate", "0ms")
    refused(capsys, "one prompt", folder, "--layout", "pp=2", "--emulate", "1ms", "--tokens", 1, "--tokens", 2)
    refused(
        capsys,
        "--max-new-tokens is for answers, and --emulate reads a prompt",
        folder,
        "--layout",
        "pp=2",
        "--emulate",
        "1ms",
        "--max-new-tokens",
        3,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "1", "--report", "turns"],
        ["--compare", "tp=2"],
        ["--layout", "pp=2", "--chunk", "32", "--emulate", "3ms"],
    ],
    ids=["plain", "compare", "pretend"],
)
def test_a_signal_before_there_are_ranks_leaves_nothing_behind(
    folder: Path, tmp_path: Path, arguments: list[str], number: signal.Signals, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Service's folder, the notes' and the reports' are there when it comes."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    came: list[int] = []

    def start(*_: object) -> None:
        came.append(len(list((tmp_path / "temporary").iterdir())))
        signal.raise_signal(number)

    monkeypatch.setattr(Service, "_thread", start)

    def unheard(*_: object) -> None:
        raise AssertionError("nobody listened")

    before = signal.signal(number, unheard)
    try:
        assert main(["generate", str(folder), *arguments]) == 128 + number
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == f"shardwise: stopped by {number.name}\n" and came[0] > 0
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def test_an_interrupt_leaves_nothing_behind(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "generate", str(folder), "--tokens", "1", "--layout", "tp=2",
         "--max-new-tokens", "255", "--temperature", "1", "--precision", "fp32"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(), start_new_session=True,
        # A shell that runs the tests in its background has them ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    found = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, 130), errors
    deadline = time.monotonic() + 5
    while any(map(alive, found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == 2 and not any(map(alive, found))


# -- `shardwise generate --compare`: strategies side by side, predicted without torch or weights, or as they ran here


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


def test_the_network_between_nodes_is_named(capsys):
    seconds = []
    for network in ([], ["--network", "100Gb"], ["--network", "8x400Gb"]):
        assert main(["generate", "llama-3-8b", "--cluster", "2x8xH100", "--compare", "tp=16", *network, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["predicted"]["strategies"][0]
        seconds.append(found["prompt"]["seconds"])
    assert seconds[1] > seconds[2] == pytest.approx(seconds[0])
    assert main(["generate", "llama-3-8b", "--compare", "--network", "100Gb"]) == 2
    assert "--network does nothing here" in capsys.readouterr().err


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
