"""The command line: results on standard output, one line for every mistake, exit codes."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from harness import forked
from harness.cases import from_table
from harness.command_line import mistake
from shardwise.api import TrainResult
from shardwise.cli.main import COMMANDS
from shardwise.cli.quantities import count_of
from shardwise.errors import UserError
from shardwise.model import catalog
from shardwise.model.changes import change
from shardwise.report import Bytes, LedgerRow, Role, StepReport
from shardwise.runtime.job.launch import RunFailed

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "COLUMNS": "200"}


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("some words to learn from\n" * 100)
    return file


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def report(source: str = "predicted", count: int = 4) -> StepReport:
    row = LedgerRow("backward", "all_reduce", "dp", "blocks.0", "float32", 1000, count)
    role = Role("all", (0, 1), Bytes(parameters=8_000, gradients=4_000), (row,))
    return StepReport(source, {"name": "small"}, "dp=2", {"seq": 8, "batch": 2}, "2xCPU", (role,), notes=("a note",))


def test_version_and_help(command):
    assert command("--version") == (0, f"shardwise {shardwise.__version__}\n", "")
    code, out, err = command("--help")
    assert (code, err) == (0, "") and all(name in out for name in COMMANDS)
    assert command() == (2, out, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(command, name):
    code, out, _ = command(name, "--help")
    assert code == 0 and "--json" in out and "--traceback" in out


@pytest.mark.parametrize("action", ["checkpoint verify", "collective show", "pipeline run", "calibrate network"])
def test_every_action_shows_what_every_command_takes(command, action):
    code, out, _ = command(*action.split(), "--help")
    assert code == 0 and "--json" in out and "--traceback" in out


def test_unknown_words(command):
    mistake(command("xyz"), "unknown command 'xyz'", ", ".join(COMMANDS))


def test_errors_are_json_under_json(command, tmp_path):
    line = "no such report or run directory: nothing"
    assert command("compare", "nothing") == (2, "", f"shardwise: error: {line}\n")
    code, out, err = command("compare", "nothing", "--json")
    assert (code, json.loads(out), err) == (2, {"error": line, "exit_code": 2}, f"shardwise: error: {line}\n")
    code, out, _ = command("estimte", "--json")
    assert code == 2 and "did you mean estimate?" in json.loads(out)["error"]
    # The --json of a command that another one starts is not this one's.
    code, out, _ = command("launch", "--slurm", "--cluster", "2x8xH100", "--", "train", "--json")
    assert (code, out) == (2, "")


def test_a_bug_is_json_under_json(command, monkeypatch):
    monkeypatch.setattr("shardwise.cli.compare.compare", lambda *_: 1 / 0)
    report("measured").write(Path("a.json"))
    code, out, _ = command("compare", "a.json", "a.json", "--json")
    assert code == 1 and json.loads(out)["exit_code"] == 1 and "ZeroDivisionError" in json.loads(out)["error"]


def test_an_unexpected_error_is_called_a_bug(command, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("shardwise.cli.compare.compare", broken)
    report("measured").write(Path("a.json"))
    code, out, err = command("compare", "a.json", "a.json")
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "RuntimeError: first line second line; this is a bug in shardwise, --traceback shows where" in err
    for argv in (("--traceback", "compare", "a.json", "a.json"), ("compare", "a.json", "a.json", "--traceback")):
        code, _, err = command(*argv)
        assert code == 1 and err.startswith("Traceback") and "in broken" in err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "shardwise: interrupted\n"),
        (KeyboardInterrupt("stopped by SIGINT"), 130, "shardwise: stopped by SIGINT\n"),
        (RunFailed("rank 2 was killed by SIGKILL"), 1, "shardwise: error: rank 2 was killed by SIGKILL\n"),
        (SystemExit(143), 143, ""),
    ],
)
def test_how_a_run_can_end(command, monkeypatch, text, error, code, line):
    def ends(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("shardwise.api.train", ends)
    assert command("train", "gpt2", "--data", text, "--seq", 8, "--batch", 2) == (code, "", line)


def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "--help"], stdout=writing, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [("--help",), ("collective", "list", "--json")])
def test_output_that_cannot_be_written_is_one_line(tmp_path, words, buffered):
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words],
            stdout=out, stderr=subprocess.PIPE, text=True, preexec_fn=little_room,
            env={**ENVIRONMENT, "PYTHONUNBUFFERED": "" if buffered else "1"},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "shardwise: error: cannot write: File too large\n")


def test_output_that_is_closed_is_one_line():
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m shardwise collective list >&-"],
        stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("shardwise: error: standard output is closed")
    assert done.stderr.count("\n") == 1


def test_a_disk_without_room_is_no_bug(command, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a.json.partial")

    monkeypatch.setattr("shardwise.cli.compare.compare", full)
    report("measured").write(Path("a.json"))
    mistake(command("compare", "a.json", "a.json"), "cannot write to a.json.partial: No space left on device")


def test_a_terminal_without_these_characters_gets_question_marks(tmp_path):
    report("measured").write(tmp_path / "a.json")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "compare", "a.json", "a.json"],
        capture_output=True,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"") and b"all_reduce" in done.stdout


class TestEstimate:
    FULL = ("estimate", "gpt2", "--layout", "dp=2", "--cluster", "8xH100", "--seq", "64", "--batch", "8")

    @pytest.fixture
    def predicted(self, monkeypatch):
        """The arguments of the last call of `estimate`, which returns `report()`."""
        calls: list[tuple] = []

        def estimate(*args: object) -> StepReport:
            calls.append(args)
            return report()

        monkeypatch.setattr("shardwise.predict.estimate", estimate, raising=False)
        return calls

    def test_json_is_the_report_itself(self, command, predicted):
        code, out, err = command(*self.FULL, "--isolate-documents", "--set", "layers=2,vocab=1000", "--json")
        assert (code, err) == (0, "")
        assert StepReport.from_json(json.loads(out)) == report()
        model, layout, workload, cluster = predicted[-1]
        assert (model.layers, model.vocab, str(layout), str(cluster)) == (2, 1000, "dp=2", "8xH100-80GB-SXM")
        assert (workload.seq, workload.batch, workload.isolate_documents) == (64, 8, True)

    def test_the_page_has_memory_ledger_and_notes(self, command, predicted):
        code, out, err = command(*self.FULL)
        assert (code, err) == (0, "")
        assert all(word in out for word in ("8.00 kB", "12.0 kB", "fits", "all_reduce", "16.0 kB", "a note"))

    def test_a_workload_that_is_not_given_is_said(self):
        words = ("estimate", "llama-3-8b", "--layout", "dp=8,zero=3", "--cluster", "8xH100")
        done = forked.shardwise(*words, environment=dict(os.environ), timeout=100)
        assert done.returncode == 0, done.stderr
        assert "assumed: --seq 8192: the context length of llama-3-8b" in done.stdout
        assert "assumed: --batch 256: 2,097,152 tokens per step" in done.stdout

    def test_breakdown(self, command):
        full = ("estimate", "llama-3-8b", "--layout", "dp=8", *self.FULL[4:])
        code, out, err = command(*full, "--breakdown", "--json")
        assert (code, err) == (0, "")
        data = json.loads(out)
        (role,), terms = data["roles"], data["breakdown"]
        assert sum(term["nbytes"] for term in terms["saved"]) == role["bytes"]["saved"]
        assert [row["name"] for row in terms["recompute"]] == ["none", "selective", "full", "input"]
        code, out, _ = command(*full, "--breakdown")
        assert code == 0 and "ZeRO 0: 16 bytes per parameter" in out and "all_reduce" not in out

    def test_the_ledger_is_behind_verbose(self, command):
        full = ("estimate", "llama-3-8b", "--layout", "dp=8", *self.FULL[4:])
        code, out, _ = command(*full)
        assert code == 0 and "communication of one step" in out and "blocks.0-31" not in out
        assert out.splitlines()[2].startswith(("fits, ", "does not fit, "))
        code, out, _ = command(*full, "--verbose")
        assert code == 0 and "ledger of one step" in out and "blocks.0-31" in out

    def test_zero_table_of_the_paper(self, command):
        code, out, err = command("estimate", "--params", "7e9", "--zero-table", "1,2,4,8,16", "--json")
        assert (code, err) == (0, "")
        table = json.loads(out)["gigabytes_per_gpu"]
        assert {stage: row["8"] for stage, row in table.items()} == {"0": 112, "1": 38.5, "2": 26.25, "3": 14}
        assert list(table["3"]) == ["1", "2", "4", "8", "16"]

    def test_a_number_of_parameters_alone(self, command):
        code, out, err = command("estimate", "--params", "7e9")
        assert (code, err) == (0, "") and "14.0 GB of weights, 14.0 GB of gradients, 84.0 GB of optimizer" in out
        assert "112 GB, 16 bytes per parameter" in out and "hold at most 1.50B parameters" in out and "16 GPUs" in out
        code, out, _ = command("estimate", "--params", "7e9", "--json")
        assert json.loads(out)["bytes"] == {"weights": 14e9, "gradients": 14e9, "optimizer": 84e9, "total": 112e9}

    def test_zero_table_in_words(self, command, monkeypatch):
        monkeypatch.setattr(
            "shardwise.predict.zero_table",
            lambda params, ranks: {stage: {n: params * (16 - stage) / n for n in ranks} for stage in range(4)},
            raising=False,
        )
        code, out, err = command("estimate", "gpt2", "--zero-table", "1,8")
        assert (code, err) == (0, "") and "124M parameters" in out
        (row,) = (line for line in out.splitlines() if line.startswith("0 "))
        assert row.split() == ["0", "1.99", "GB", "249", "MB", "1", "x"]

    @pytest.mark.parametrize(("text", "params"), [("7e9", 7e9), ("7B", 7e9), ("350m", 350e6), ("1.5T", 1.5e12)])
    def test_numbers_of_parameters(self, text, params):
        assert count_of("parameters", "--params", text) == params


class TestSet:
    def test_derived_fields_follow(self):
        model = change(catalog.get("gpt2"), "hidden=64,heads=4,ffn=256")
        assert (model.head_dim, model.kv_heads, model.published_params) == (16, 4, None)
        llama = change(catalog.get("llama-3-8b"), "heads=16")
        assert (llama.heads, llama.kv_heads, llama.head_dim) == (16, 8, 256)
        assert change(catalog.get("qwen3-0.6b"), "hidden=512").head_dim == 128

    def test_kinds_of_values(self):
        model = change(catalog.get("gpt2"), "tied=false, norm_eps=1e-6,activation=gelu,dropout=0")
        assert (model.tied, model.norm_eps, model.activation, model.dropout) == (False, 1e-6, "gelu", 0.0)

    def test_nothing_changes_nothing(self):
        assert change(catalog.get("gpt2"), "") is catalog.get("gpt2")

    @from_table
    def test_mistakes(self, text, words):
        with pytest.raises(UserError) as caught:
            change(catalog.get("gpt2"), text)
        assert words in str(caught.value) and "\n" not in str(caught.value)


class TestCompare:
    @pytest.fixture
    def run(self, tmp_path):
        folder = tmp_path / "run"
        (folder / "reports").mkdir(parents=True)
        report().write(folder / "reports" / "predicted.json")
        report("measured").write(folder / "reports" / "measured.json")
        report("measured", count=5).write(tmp_path / "other.json")
        return folder

    def test_a_run_with_itself(self, command, run):
        code, out, err = command("compare", run)
        assert (code, err) == (0, "") and "1 of 1 rows equal" in out and "predicted" in out and "measured" in out

    def test_json(self, command, run):
        code, out, err = command("compare", run, "--json")
        assert (code, err, json.loads(out)["equal_ledger"]) == (0, "", True)

    def test_a_different_ledger_is_exit_code_1(self, command, run):
        code, out, err = command("compare", run, "other.json", "--json")
        assert (code, err) == (1, "")
        assert [(row["count_a"], row["count_b"]) for row in json.loads(out)["rows"]] == [(4, 5)]
        assert command("compare", "other.json", run)[0] == 1
        assert command("compare", run, run)[0] == 0

    def test_two_predictions_are_side_by_side(self, command, run, tmp_path):
        """They need not be equal, so that no mark and no exit code says that they differ."""
        report(count=5).write(tmp_path / "b.json")
        code, out, err = command("compare", run / "reports" / "predicted.json", "b.json")
        assert (code, err) == (0, "") and "✗" not in out
        assert out.splitlines()[0] == "Compared with A, B communicates 25.0% more bytes."
        code, out, _ = command("compare", run / "reports" / "predicted.json", "b.json", "--json")
        rows = {row["name"]: row for row in json.loads(out)["quantities"]}
        assert code == 0 and (rows["all_reduce (dp)"]["a"], rows["all_reduce (dp)"]["b"]) == (16_000, 20_000)
        assert rows["step"] == {"name": "step", "unit": "s", "a": None, "b": None, "change": None}

    def test_mistakes(self, command, run):
        mistake(command("compare", "other.json"), "is one report")
        (run / "reports" / "predicted.json").unlink()
        mistake(command("compare", run), "no predicted report: its layout has no prediction")
        Path("damaged.json").write_text("{")
        mistake(command("compare", "damaged.json", run), "damaged.json")


class TestTrain:
    @pytest.fixture
    def small(self, text):
        shape = "vocab=300,hidden=16,layers=1,heads=2,ffn=32,attention_dropout=0"
        words = ["train", "gpt2", "--set", shape, "--data", text, "--seq", 8, "--batch", 4, "--layout", "dp=2"]
        return [*words, "--out", "run"]

    @pytest.fixture
    def no_ranks(self, monkeypatch):
        def started(*_: object, **__: object) -> int:
            raise AssertionError("ranks were started")

        monkeypatch.setattr("shardwise.runtime.job.restart.supervise", started)

    def test_options_reach_the_configuration(self, command, monkeypatch, small):
        asked: dict = {}

        def train(**request: object) -> None:
            asked.update(request)
            raise UserError("enough")

        monkeypatch.setattr("shardwise.api.train", train)
        mistake(command(*small, "--lr", "0.5", "--no-overlap", "--port", 1234, "--threads", 2, "--json"), "enough")
        assert (asked["optimizer"].lr, asked["optimizer"].clip) == (0.5, 1.0)
        assert asked["workload"].optimizer == "adamw"
        mistake(command(*small, "--optimizer", "momentum", "--momentum", "0.8"), "enough")
        assert (asked["workload"].optimizer, asked["optimizer"].momentum) == ("momentum", 0.8)
        mistake(command(*small, "--no-overlap", "--port", 1234, "--threads", 2, "--json"), "enough")
        assert asked["overlap"] is False and not asked.keys() & {"tensorboard", "report", "save_async"}
        assert (asked["port"], asked["threads"], asked["rank0_stdout"]) == (1234, 2, 2)
        assert asked["model"].vocab == 300 and "seed" not in asked

    def test_binary_data_starts_no_ranks(self, command, small, no_ranks):
        Path("text.txt").write_bytes(b"\0\1\2" * 100)
        code, out, err = command(*small)
        assert (code, out) == (2, "")
        assert "text.txt is binary" in err.splitlines()[-1] and "Traceback" not in err
        assert not Path("run").exists()

    def test_a_rank_of_torchrun_says_where_the_run_is(self, command, small, monkeypatch):
        def trained(config, **_: object) -> int:
            Path(config().out).mkdir()
            Path("run/result.json").touch()
            return 0

        class Left(SystemExit):
            pass

        def leave(code: int) -> None:
            raise Left(code)

        monkeypatch.setattr("shardwise.api.train_as_rank", trained)
        monkeypatch.setattr("shardwise.runtime.job.rank.leave", leave)
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank, said in (("0", "the run is in run\n  result.json            the result\n"), ("1", "")):
            monkeypatch.setenv("RANK", rank)
            assert command(*small) == (0, said, "")
            shutil.rmtree("run")

    def test_a_run_that_nobody_reads_has_succeeded_all_the_same(self, command, small, monkeypatch):
        reading, writing = os.pipe()
        os.close(reading)
        monkeypatch.setattr("shardwise.api.train", lambda **_: TrainResult(Path("run"), {}))
        with os.fdopen(writing, "w", buffering=1) as broken, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", broken)
            assert command(*small)[0] == 0

    def test_under_torchrun_the_run_directory_is_named(self, command, small, no_ranks, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        at = small.index("--out")
        mistake(command(*small[:at]), "under torchrun", "--out")
        mistake(command(*small, "--port", 1234), "leave out --port")


@from_table
def test_former_names_of_options_are_accepted(command, words, line):
    mistake(command(*words.split()), line)


@pytest.mark.parametrize("words", [["collective", "list"], ["pipeline", "list"]])
def test_former_lists(command, words):
    code, out, _ = command(*words, "--json")
    assert code == 0 and json.loads(out)


def test_list_alone_says_what_there_is(command):
    kinds = json.loads(command("list", "--json")[1])
    assert len(kinds) == 7 and all(command("list", kind, "--json")[0] == 0 for kind in kinds)
