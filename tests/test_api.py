"""`train` around a stand-in for the ranks: what is checked, prepared, handed to them, and returned."""

import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardwise
from harness.cases import from_table
from shardwise import ModelConfig, UserError, Workload, api
from shardwise.calls import in_python
from shardwise.checkpoint import Manifest, PartEntry, Piece, TensorSpec, commit, keep_last, write_part
from shardwise.checkpoint.geometry import full
from shardwise.data import Corpus
from shardwise.model.lora import Lora
from shardwise.report import StepReport
from shardwise.report.run_directory import RunDirectory
from shardwise.runtime import installed
from shardwise.runtime.job.config import OptimizerConfig, TrainConfig
from shardwise.runtime.job.hosts import VARIABLE, HostFile, LaunchHost
from shardwise.runtime.job.launch import Ending, RunFailed
from shardwise.runtime.job.locks import run_lock

MODEL = ModelConfig("small/model", vocab=300, hidden=16, layers=1, heads=2, ffn=32, max_positions=64)
WORKLOAD = Workload(seq=8, batch=4)
TOKENIZER = (
    '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 500, "<|endoftext|>": 1}, "merges": []},'
    '"added_tokens": [{"id": 1, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,'
    '"normalized": false, "special": true}]}'
)


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text").mkdir()
    for number in range(8):
        Path("text", f"{number}.txt").write_text(f"document {number} has some words to learn from\n" * 40)


class Ranks:
    """Stands in for the launcher: reads what ranks would read, and ends as told."""

    def __init__(self) -> None:
        self.code, self.line = 0, ""
        self.configs: list[TrainConfig] = []
        self.options: list[dict] = []

    def __call__(self, command: list[str], ranks: int, **options) -> Ending:
        assert command[1:3] == ["-m", "shardwise.runtime.job.worker"]
        config = TrainConfig.read(Path(command[3]))
        self.configs.append(config)
        self.options.append({"ranks": ranks, **options})
        if self.code:
            return Ending(self.code, self.line)
        out = Path(config.out)
        (out / "reports").mkdir(parents=True)
        (out / "run.json").write_text("{}")
        (out / "result.json").write_text(json.dumps({"steps": config.steps}))
        events = [{"step": 1, "loss": 5.5}, {"validation_loss": 5.0}, {"step": 2, "loss": 4.5}]
        (out / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return Ending(0)


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    stand_in = Ranks()
    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", stand_in)
    return stand_in


def train(**changes):
    lines: list[str] = []
    request = {"model": MODEL, "layout": "dp=2", "workload": WORKLOAD, "data": "text", "steps": 2, **changes}
    return shardwise.train(**request, progress=lines.append)


def test_a_run_from_text_to_result(ranks):
    result = train(report=True, seed=3, threads=2, device="cpu")
    assert result.out == Path("runs/small-model-1")
    assert result.summary == {"steps": 2} and result.losses == [5.5, 4.5]
    (config,) = ranks.configs
    assert (config.seed, config.report, config.out, config.model) == (3, True, str(result.out), MODEL)
    asked = {"ranks": 2, "port": 0, "threads": 2, "loopback": True, "rank0_stdout": None, "hang": config.hang}
    assert ranks.options[0] == asked
    corpus = Corpus.open(Path(config.corpus))
    assert corpus.path.parent == Path("runs/corpora").resolve() and corpus.vocab_size <= 300
    assert result.predicted.source == "predicted" and result.predicted.cluster == "2xCPU"
    with pytest.raises(UserError, match="measured"):
        _ = result.report


def test_a_random_base_is_said(ranks):
    lines: list[str] = []
    shardwise.train(MODEL.replace(lora=Lora(2)), "dp=1", workload=WORKLOAD, data="text", steps=2, progress=lines.append)
    assert lines[0] == "warning: adapters of a random base: give its weights with --weights"


def test_a_result_prints(ranks):
    result = train(report=True)
    assert repr(result) == "<TrainResult: 2 steps: loss None, None on held-out text, in runs/small-model-1>"
    rates = {"tokens_per_s": 8500.0, "median_step_s": 0.06, "mfu": 0.123}
    result.summary.update(layout="dp=2", loss=4.5, validation_loss="NaN", **rates)
    assert str(result).splitlines() == [
        "2 steps as dp=2: loss 4.500, NaN on held-out text, in runs/small-model-1",
        "60.0 ms per step, 8.50k tokens/s, 12.3% of the matrix products that the ranks reach alone (MFU)",
    ]
    result.predicted.write(result.out / "reports" / "measured.json")
    assert "memory per rank" in str(result) and result._repr_html_().count("saved activations") == 1


def test_the_next_run_gets_the_next_name_and_the_same_corpus(ranks):
    first, second = train(), train(seed=1)
    assert (first.out.name, second.out.name) == ("small-model-1", "small-model-2")
    assert ranks.configs[0].corpus == ranks.configs[1].corpus
    assert not (second.out / "reports/predicted.json").exists()


def test_runs_that_begin_together_get_names_of_their_own(ranks, monkeypatch):
    together = threading.Barrier(3)
    monkeypatch.setattr(api, "_check_fits", lambda config: together.wait(30))  # all have chosen the same name by then
    results: list[shardwise.TrainResult] = []
    starting = [threading.Thread(target=lambda: results.append(train())) for _ in range(3)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    assert sorted(result.out.name for result in results) == [f"small-model-{number}" for number in (1, 2, 3)]
    assert sorted(config.out for config in ranks.configs) == sorted(str(result.out) for result in results)


def test_a_predicted_report_is_the_estimate(ranks):
    config = train(report=True, layout="dp=2,zero=3", out="here")
    expected = shardwise.estimate(MODEL, shardwise.Layout(dp=2, zero=3), WORKLOAD)
    written = StepReport.read(config.out / "reports/predicted.json")
    assert replace(written, room=None, cluster_links=None) == StepReport.from_json(expected.to_json())
    assert written.room and written.cluster_links


@pytest.mark.parametrize(("code", "error"), [(2, UserError), (1, RunFailed), (130, KeyboardInterrupt)])
def test_how_ranks_end_is_raised(ranks, code, error):
    ranks.code, ranks.line = code, "what happened"
    with pytest.raises(error, match="what happened"):
        train(out="here")
    assert not Path("here").exists(), "an empty run directory was left"


def test_a_termination_ends_the_program(ranks):
    ranks.code = 128 + signal.SIGTERM
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143


def test_what_is_there_is_not_overwritten(ranks):
    Path("here").mkdir()
    assert train(out="here").out == Path("here")
    with pytest.raises(UserError, match="here is not empty; nothing was overwritten"):
        train(out="here")
    assert len(ranks.configs) == 1


def test_a_folder_that_cannot_be_made(ranks):
    with pytest.raises(UserError, match=r"choose another out"):
        train(out="text/0.txt/run")


def test_vocabulary_follows_when_asked(ranks):
    train(vocab=280)
    assert ranks.configs[0].model.vocab == 280
    assert Corpus.open(Path(ranks.configs[0].corpus)).vocab_size <= 280
    with pytest.raises(UserError, match="at least 257"):
        train(vocab=100)


def test_only_the_beginning_of_a_text_is_used_when_asked(ranks):
    train(max_bytes=2000)
    train()
    limited, whole = (Corpus.open(Path(config.corpus)).text_bytes for config in ranks.configs)
    assert limited == 2000 < whole


def test_a_tokenizer_larger_than_the_model(ranks):
    Path("tokenizer.json").write_text(TOKENIZER)
    with pytest.raises(UserError, match=r"the tokenizer has 501 tokens.*vocabulary of 300; add vocab=501"):
        train(tokenizer=Path("tokenizer.json"))
    train(tokenizer=Path("tokenizer.json"), vocab=501)
    assert ranks.configs[0].tokenizer == "tokenizer.json"


def test_text_that_does_not_fill_a_sequence(ranks):
    Path("short.txt").write_text("a few words")
    with pytest.raises(UserError, match=r"short.txt, (train|validation) part: .*shorten the sequence"):
        train(data="short.txt", workload=Workload(seq=60, batch=4))


@from_table
def test_mistakes(ranks, changes, words):
    with pytest.raises(UserError) as caught:
        train(**changes)
    assert words in str(caught.value)
    assert not ranks.configs and not Path("runs").exists()


@from_table
def test_mistakes_of_the_optimizer(changes, words):
    with pytest.raises(UserError, match=words):
        OptimizerConfig(**changes)


def test_torch_is_asked_for_by_name(ranks, monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"training needs torch: pip install 'shardwise\[train\]'"):
        train()


def test_what_the_machine_cannot_hold_is_not_begun(ranks, monkeypatch):
    predicted = shardwise.estimate(MODEL, shardwise.Layout(dp=2), WORKLOAD)
    held = sum(len(role.ranks) * role.peak_bytes for role in predicted.roles)
    monkeypatch.setattr("shardwise.cluster.catalog.machine_memory", lambda: held)
    train(layout="dp=2")
    monkeypatch.setattr("shardwise.cluster.catalog.machine_memory", lambda: held - 1)
    with pytest.raises(UserError, match=r"small/model under dp=2 needs .*, this machine has .*: train a smaller"):
        train(layout="dp=2", out="none")
    assert len(ranks.configs) == 1 and not Path("none").exists()
    train(layout="dp=2,compile=block")


def test_inside_torchrun_no_ranks_are_started(ranks, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun -m shardwise train"):
        train()


def test_preparing_together_prepares_once(monkeypatch):
    """Ranks of one host that torchrun started ask at the same time."""
    config = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="here")
    lines: list[str] = []
    corpora: list[str] = []
    asking = [
        threading.Thread(target=lambda: corpora.append(api.with_corpus(config, lines.append).corpus)) for _ in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(corpora) == 4 and len(set(corpora)) == 1
    assert sum("training a tokenizer" in line for line in lines) == 1
    assert sum("prepared already" in line for line in lines) == 3


def test_what_a_killed_preparation_left_is_removed(monkeypatch):
    config = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="runs/here")
    left = Path("runs/corpora/.partial-corpus-0123456789ab-01234567")
    left.mkdir(parents=True)
    (left / "train.bin").touch()
    # Without a lock somebody may be at work there.
    with monkeypatch.context() as without:
        without.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
        api.with_corpus(config, print)
        assert left.exists()
    corpus = Path(api.with_corpus(config, print).corpus)
    assert sorted(path.name for path in corpus.parent.iterdir()) == [".lock", corpus.name]


@pytest.mark.parametrize(("restarts", "said"), [(1, ""), (2, "shardwise: The run had not begun: start it again\n")])
def test_a_rank_of_torchrun_that_fails_for_good_says_what_to_do(monkeypatch, capsys, restarts, said):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "TORCHELASTIC_MAX_RESTARTS": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))

    def guarded(configuration) -> int:
        configuration()
        capsys.readouterr()
        return 1

    monkeypatch.setattr("shardwise.runtime.job.worker.guarded", guarded)
    asked = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="here")
    assert api.train_as_rank(lambda: asked) == 1
    assert capsys.readouterr().err == said and not Path("here").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun(monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    trained: list[TrainConfig] = []

    def guarded(configuration) -> int:
        trained.append(configuration())
        Path(trained[0].out, "reports").mkdir(parents=True)
        return 0

    monkeypatch.setattr("shardwise.runtime.job.worker.guarded", guarded)
    asked = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="here", report=True)
    assert api.train_as_rank(lambda: asked) == 0
    assert trained[0].corpus
    assert Path("here/reports/predicted.json").exists() == (rank == 0)


def test_a_rank_of_torchrun_checks_the_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.delenv("SHARDWISE_ERROR_FILE", raising=False)
    asked = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="here")
    assert api.train_as_rank(lambda: asked) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardwise: error: layout dp=2 needs") and "there are 3" in err and err.count("\n") == 1


# -- a run that goes on


def begun(ranks, **changes) -> TrainConfig:
    train(out="runs/a", **changes)
    config = ranks.configs[-1]
    checkpoint_of(config, Path("runs/a/checkpoints/step-2"))
    return config


def checkpoint_of(config: TrainConfig, folder: Path, **about) -> None:
    entries = [PartEntry("model/x", TensorSpec((2,), "float32"), Piece.whole(full((2,))))]
    record = write_part(folder, 0, entries, [np.zeros(2, np.float32)])
    told = config.to_json() | about
    commit(folder, Manifest.of([record], step=2, samples=8, seed=0, optimizer_steps=2, about=told))


def resumed(ranks, lines=None, **changes) -> TrainConfig:
    lines = [] if lines is None else lines
    with suppress(FileExistsError):  # of the stand-in
        api.resume("runs/a", steps=4, progress=lines.append, **changes)
    return ranks.configs[-1]


def test_another_optimizer_needs_no_more_than_the_checkpoint_has(ranks):
    config = begun(ranks, workload=replace(WORKLOAD, optimizer="momentum"))
    assert config.to_json()["workload"]["optimizer"] == "momentum" and "optimizer" not in WORKLOAD.to_json()
    with pytest.raises(UserError, match="lacks the first and second moments that adamw needs: resume with"):
        api.resume("runs/a", steps=4, workload=WORKLOAD)
    without = resumed(ranks, workload=replace(WORKLOAD, optimizer="sgd"))
    assert without.workload.optimizer == "sgd" and without.resume


@pytest.mark.parametrize("fate", ["unchanged", "changed", "deleted"])
def test_a_resumed_run_keeps_its_text(ranks, fate):
    Path("text/x.bin").write_bytes(b"\0")
    first = begun(ranks)
    told = json.loads(Path("runs/a/checkpoints/step-2/manifest.json").read_text())["about"]
    assert told["corpus_fingerprint"] == Corpus.open(Path(first.corpus)).fingerprint
    if fate == "changed":
        Path("text/0.txt").write_text("quite another text\n" * 40)
    elif fate == "deleted":
        shutil.rmtree("text")
    lines: list[str] = []
    again = resumed(ranks, lines)
    assert (again.corpus, again.corpus_fingerprint) == (first.corpus, first.corpus_fingerprint)
    assert again.former_corpus is None
    own, skipped = lines
    assert own == f"the text is the run's own, in {first.corpus}; for other text give --data"
    assert skipped.startswith("skipped 1 of") and "x.bin" in skipped


def test_other_text_is_asked_for_and_what_it_means_is_said(ranks):
    first = begun(ranks)
    Path("text/0.txt").write_text("quite another text\n" * 40)
    lines: list[str] = []
    again = resumed(ranks, lines, data="text")
    assert again.corpus != first.corpus and again.former_corpus == first.corpus
    theirs, ours = (Path(config.corpus, "tokenizer.json").read_text() for config in (first, again))
    assert theirs == ours
    assert lines[-1] == (
        f"warning: from step-2 on the run trains on other text: text in place of {first.corpus}. Losses from there on "
        "are not comparable with earlier ones"
    )
    # The run's own text from now on.
    checkpoint_of(again, Path("runs/a/checkpoints/step-3"))
    shutil.rmtree("text")
    assert resumed(ranks).corpus == again.corpus


def test_the_same_text_asked_for_is_no_other_text(ranks):
    first = begun(ranks)
    shutil.copytree("text", "elsewhere")
    lines: list[str] = []
    again = resumed(ranks, lines, data="elsewhere")
    assert (again.corpus, again.former_corpus, lines[-1]) == (first.corpus, None, "the text is the run's own")


def test_a_run_that_was_moved_finds_its_corpus(ranks):
    first = begun(ranks)
    shutil.rmtree("text")
    Path("runs").rename("moved")
    with suppress(FileExistsError):
        api.resume("moved/a", steps=4, progress=print)
    assert ranks.configs[-1].corpus == str(Path("moved/corpora").absolute() / Path(first.corpus).name)
    api.resume("moved/a", steps=4, progress=print, out="far/away")
    assert ranks.configs[-1].corpus == str(Path("moved/corpora").absolute() / Path(first.corpus).name)


def test_a_corpus_that_has_gone_comes_again_from_the_same_text_alone(ranks):
    first = begun(ranks)
    shutil.rmtree("runs/corpora")
    assert resumed(ranks).corpus_fingerprint == first.corpus_fingerprint
    shutil.rmtree("runs/corpora")
    Path("text/0.txt").write_text("quite another text\n" * 40)
    with pytest.raises(
        UserError, match=r"is gone or damaged .* from text: the text or its settings have changed; .* with --data"
    ):
        resumed(ranks)
    assert resumed(ranks, data="text").corpus_fingerprint != first.corpus_fingerprint


def test_runs_of_earlier_versions_keep_their_corpus(ranks):
    """Their configuration has no fingerprint, and the fingerprint of their corpus covers times of files."""
    first = begun(ranks)
    corpus = Path(first.corpus, "corpus.json")
    corpus.write_text(json.dumps(json.loads(corpus.read_text()) | {"fingerprint": "0123456789ab" * 5}))
    folder = Path("runs/a/checkpoints/step-2")
    shutil.rmtree(folder)
    old = {
        name: value for name, value in first.to_json().items() if name not in ("corpus_fingerprint", "former_corpus")
    }
    checkpoint_of(first, folder)
    manifest = Manifest.read(folder)
    commit(folder, replace(manifest, about=old))
    assert resumed(ranks).corpus == first.corpus
    lines: list[str] = []
    assert resumed(ranks, lines, data="text").former_corpus is None and lines[-1] == "the text is the run's own"
    shutil.rmtree("text")
    assert resumed(ranks).corpus == first.corpus


def test_a_restart_by_torchrun_keeps_the_text_of_the_run(monkeypatch):
    """Its ranks are given the same words again, whatever the text is by then."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    trained: list[TrainConfig] = []

    def guarded(configuration) -> int:
        trained.append(configuration())
        if not Path("here/run.json").exists():
            RunDirectory.create("here", {"config": trained[0].to_json(), "job": "job"})
        return 0

    monkeypatch.setattr("shardwise.runtime.job.worker.guarded", guarded)
    asked = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="here")
    assert api.train_as_rank(lambda: asked) == 0
    Path("text/0.txt").write_text("quite another text\n" * 40)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert api.train_as_rank(lambda: asked) == 0
    assert trained[1].corpus == trained[0].corpus and trained[1].restart == 1


@pytest.mark.parametrize(
    ("saved", "begun", "words"),
    [
        (True, True, "The run is saved up to step 2; resume with: shardwise train --resume 'runs/a run'"),
        (False, True, "The run has no checkpoint yet: start it again with another --out, and with --save-every N"),
        (False, False, "The run had not begun: start it again"),
    ],
)
@pytest.mark.parametrize("code", [1, 130, 143])
def test_a_run_that_did_not_finish_says_what_to_do(monkeypatch, capsys, saved, begun, words, code):
    def supervise(command: list[str], *_: object, **__: object) -> Ending:
        config = TrainConfig.read(Path(command[3]))
        if begun:
            RunDirectory.create(config.out, {"config": config.to_json()})
        if saved:
            checkpoint_of(config, Path(config.out, "checkpoints/step-2"))
        return Ending(code, "rank 1 was killed by SIGKILL", (1,))

    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", supervise)
    with pytest.raises((RunFailed, KeyboardInterrupt, SystemExit)) as caught:
        train(out="runs/a run")
    line = capsys.readouterr().err if code == 143 else str(caught.value)
    assert line.removeprefix("shardwise: ").startswith(f"rank 1 was killed by SIGKILL. {words}") and "SIGKILL" in line


def test_a_signal_that_comes_too_late_stops_no_run(monkeypatch):
    def supervise(command: list[str], *_: object, **__: object) -> Ending:
        out = TrainConfig.read(Path(command[3])).out
        RunDirectory.create(out, {}).update(status="finished", finished=time.time())
        return Ending(130, "stopped by SIGINT: all 2 ranks have ended")

    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", supervise)
    with pytest.raises(KeyboardInterrupt, match=r"have ended\. The run had finished before"):
        train(out="here")
    assert RunDirectory.open("here").run["status"] == "finished"


def test_an_error_does_not_begin_on_a_line_of_progress(monkeypatch):
    reading, writing = os.openpty()

    def supervise(*_: object, rank0_stdout: int, **__: object) -> Ending:
        os.write(rank0_stdout, b"step    3/100  loss 5.0")
        return Ending(1, "rank 0 was killed by SIGKILL")

    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", supervise)
    with pytest.raises(RunFailed):
        train(rank0_stdout=writing)
    shown = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    assert shown.startswith("step    3/100") and len(shown.split("\r")[1]) >= len("step    3/100  loss 5.0")
    assert shown.endswith(" \r")


# -- one training at a time


def test_a_run_in_use_is_one_line_that_names_who_uses_it(ranks):
    begun(ranks)
    with run_lock(Path("runs/a")):
        mine = rf"runs/a is in use by another training \(process {os.getpid()} on .+\): wait"
        with pytest.raises(UserError, match=mine):
            api.resume("runs/a", steps=4)
        Path("new").mkdir()
        with run_lock(Path("new")), pytest.raises(UserError, match="new is in use by another training"):
            train(out="new")
        assert shardwise.TrainResult.read("runs/a").losses == [5.5, 4.5], "whoever reads is not held back"
    assert len(ranks.configs) == 1
    resumed(ranks)
    assert not list(Path("runs").rglob("a/.lock"))


@pytest.mark.parametrize(("out", "removed"), [("runs/b", False), (None, True)])
def test_the_source_of_a_run_keeps_the_checkpoint_until_it_has_been_read(ranks, monkeypatch, out, removed):
    first = begun(ranks)
    checkpoint = Path("runs/a/checkpoints/step-2")

    def supervise(*_: object, **__: object) -> Ending:
        newer = checkpoint.with_name("step-3")
        checkpoint_of(first, newer)
        keep_last(newer.parent, 1)
        assert checkpoint.exists() != removed
        return Ending(2, "ended")

    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", supervise)
    with pytest.raises(UserError, match=r"^ended($|\. The run is saved up to step)"):
        api.resume("runs/a", out=out, steps=4, progress=lambda line: None)


@pytest.mark.parametrize("given", [{}, {"restarts": 1}, {"restarts": 1, "out": "runs/b"}])
def test_damage_is_set_aside_for_unattended_runs_alone(ranks, monkeypatch, given):
    first = begun(ranks)
    newest = Path("runs/a/checkpoints/step-4")
    checkpoint_of(first, newest)
    part = newest / "rank-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    resumed_from: list[str] = []

    def supervise(command: list[str], *_: object, **__: object) -> Ending:
        resumed_from.append(Path(TrainConfig.read(Path(command[3])).resume).name)
        return Ending(2, "its checksum is wrong")

    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", supervise)
    with pytest.raises(UserError, match=r"^its checksum is wrong$"):
        api.resume("runs/a", steps=6, progress=lambda line: None, **given)
    fallback = given == {"restarts": 1}
    assert resumed_from == (["step-4", "step-2"] if fallback else ["step-4"])
    assert newest.exists() != fallback


def test_the_first_rank_of_torchrun_holds_the_run(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("SHARDWISE_ERROR_FILE", raising=False)
    asked = api.configure(MODEL, "dp=2", WORKLOAD, "text", out="here")

    def guarded(configuration) -> int:
        configuration()
        with pytest.raises(UserError, match="here is in use"), run_lock(Path("here")):
            pass
        return 0

    with monkeypatch.context() as patch:
        patch.setattr("shardwise.runtime.job.worker.guarded", guarded)
        assert api.train_as_rank(lambda: asked) == 0
    Path("here").mkdir()
    with run_lock(Path("here")):
        assert api.train_as_rank(lambda: asked) == 2
    assert "shardwise: error: here is in use by another training (process " in capsys.readouterr().err


def test_an_unfinished_run_has_no_result(tmp_path):
    with pytest.raises(UserError, match="has no result"):
        api.TrainResult.read(str(tmp_path))
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        api.TrainResult.read(tmp_path)


def test_measured_and_predicted_seconds_of_a_step_share_a_line(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.report("measured").parent.mkdir()
    report = StepReport("measured", {}, "dp=1", {}, "1xCPU", (), time=2.0)
    report.write(directory.report("measured"))
    assert api._step_times(directory) == ""
    for seconds, line in ((None, ""), (1.5, "step: 2.00 s measured, 1.50 s predicted (-25.0%)")):
        replace(report, source="predicted", time=seconds).write(directory.report("predicted"))
        assert api._step_times(directory) == line


def test_the_cluster_of_several_hosts_is_the_one_of_their_file(tmp_path, monkeypatch):
    hosts = [LaunchHost(f"n{i}", f"10.0.0.{i}", "eth0", ("enter",)) for i in range(2)]
    (tmp_path / "lab.toml").write_text(
        'nodes = 2\ndevices_per_node = 4\nnics = 1\ndevice = "CPU"\n[inter]\nalpha = 0.001\nbandwidth = 5e6\n'
    )
    HostFile(tuple(hosts), str(tmp_path / "lab.toml")).write(tmp_path / "hosts.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "hosts.json"))
    assert HostFile.from_environment().hosts == tuple(hosts)
    cluster = api._cluster(api.configure(MODEL, "dp=2", WORKLOAD, "text"), nodes=2)
    assert (cluster.nodes, cluster.devices_per_node, cluster.inter.bandwidth) == (2, 1, 5e6)
    (tmp_path / "hosts.json").write_text("{}")
    with pytest.raises(UserError, match="shardwise lab"):
        HostFile.from_environment()


def test_flags_of_commands_stay_as_they_are_typed():
    line = in_python("--host-memory SIZE is too little; torchrun --nproc-per-node 2 starts it; add --vocab 501")
    assert line == "host_memory=SIZE is too little; torchrun --nproc-per-node 2 starts it; add vocab=501"
