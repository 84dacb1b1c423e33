"""Run files: every run writes one that gives the same configuration again; flags take the place of what is there."""

import contextlib
import dataclasses
import io
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.command_line import mistake
from harness.today import EVERYTHING
from shardwise.api import configure
from shardwise.cli import declare, train
from shardwise.cli.main import main
from shardwise.errors import file_limit
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.changes import change
from shardwise.model.config import Experts, LatentAttention
from shardwise.model.lora import Lora
from shardwise.runtime.job.config import OptimizerConfig, TrainConfig
from shardwise.runtime.job.record import run_file

Command = Callable[..., tuple[int, str, str]]
TINY = sorted(name for name in catalog() if name.startswith("tiny-"))
SMALL = 'model = "tiny-llama"\nlayout = "dp=2"\ndata = "stdlib"\nseq = 32\nbatch = 4\n'


def read(text: str, tmp_path: Path, *argv: str) -> train.TrainOptions:
    file = tmp_path / "run.toml"
    file.write_text(text)
    options: train.TrainOptions = declare.read("train", ["--config", str(file), *argv])[0]
    return options


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Runs that can be configured without torch, with options of every kind."""
    model = catalog()[draw(st.sampled_from(TINY))]
    if draw(st.booleans()):
        model = model.replace(layers=4, vocab=draw(st.integers(300, 900)), name=draw(st.text(min_size=1)))
    if draw(st.booleans()) and not model.experts and not model.latent_attention:
        model = model.replace(lora=Lora(draw(st.integers(1, 8)), draw(st.floats(0.1, 9))))
    some = {
        "steps": st.integers(1, 9), "seed": st.integers(0, 1 << 63), "tensorboard": st.booleans(),
        "report": st.booleans(), "overlap": st.booleans(), "hang": st.floats(700, 1e6),
        "slow": st.just(("rank=0,factor=2",)), "save_async": st.booleans(), "max_bytes": st.integers(1, 99),
        "transport": st.sampled_from(["auto", "gloo"]),
    }  # fmt: skip
    options = {name: draw(values) for name, values in some.items() if draw(st.booleans())}
    optimizer = OptimizerConfig(
        lr=draw(st.floats(1e-6, 1)), betas=draw(st.sampled_from([(0.9, 0.95), (0.5, 0.75)])), clip=draw(st.floats(0, 9))
    )
    isolate, kind = draw(st.booleans()), draw(st.sampled_from(["adamw", "momentum", "sgd"]))
    workload = Workload(draw(st.integers(8, 64)), 8, isolate_documents=isolate, optimizer=kind)
    return configure(model, "dp=2,precision=fp32,attention=math", workload, "stdlib", out="runs/x",
                     optimizer=optimizer, **options)  # fmt: skip


@settings(max_examples=200 if EVERYTHING else 15)
@given(configs())
def test_a_run_file_gives_the_run_again(tmp_path_factory: pytest.TempPathFactory, config: TrainConfig) -> None:
    args = read(run_file(config), tmp_path_factory.mktemp("run"))
    again = configure(**train._request(args))
    assert replace(again, out=config.out) == config


@settings(max_examples=200 if EVERYTHING else 10)
@given(configs(), st.booleans())
def test_a_resumed_run_has_its_own_options_alone(
    tmp_path_factory: pytest.TempPathFactory, config: TrainConfig, new_text: bool
) -> None:
    """Its checkpoint has other values where the run has the defaults, and decides what cannot be changed."""
    former = "runs/corpora/x" if new_text else None
    config = replace(config, resume="runs/x/checkpoints/step-4", weights="folder", former_corpus=former)
    changes = declare.given(read(run_file(config), tmp_path_factory.mktemp("run")), TrainConfig)
    text = {"data", "text_field", "max_bytes", "tokenizer"}
    assert "weights" not in changes and bool(changes.keys() & text) == ("data" in changes) == new_text
    for name, value in changes.items():
        assert (str(config.layout) if name == "layout" else getattr(config, name)) == value
    assert {"layout", "steps", "seed", "hang", "transport"} <= changes.keys()


def test_every_option_of_a_run_is_a_key() -> None:
    flags = declare.declared(train.TrainOptions).keys()
    own = {"model", "workload", "optimizer", "corpus", "corpus_fingerprint", "former_corpus", "restart", "adapters"}
    own |= {"schedule_steps", "class_plan", "class_parts"}
    assert {field.name for field in fields(TrainConfig)} - own <= flags


def test_flags_take_the_place_of_the_file(tmp_path: Path) -> None:
    text = SMALL + 'steps = 7\nslow = ["rank=0,factor=2", "rank=1,factor=3"]\ntensorboard = false\n'
    args = read(text, tmp_path, "tiny-gpt", "--steps", "100", "--slow", "rank=1,factor=4")
    assert (args.model, args.steps, args.slow, args.seq) == ("tiny-gpt", 100, ("rank=1,factor=4",), 32)
    assert args.tensorboard is False and read(SMALL + "tensorboard = true", tmp_path).tensorboard is None
    assert read('[model]\nname = "mine"\nvocab = 9\n', tmp_path, "tiny-gpt").model == "tiny-gpt"


@from_table
def test_mistakes_name_the_file(command: Command, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    mistake(command("train", "--config", tmp_path / "x.toml"), f"{tmp_path}/x.toml: {words}")


def test_other_commands_read_files(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('model = "missing"\nlayout = "tp=2"\nquantize = "int8"\nport = 0\n')
    args, _ = declare.read("serve", ["--config", str(file), "--port", "80"])
    assert (args.model, args.layout, args.quantize, args.port) == ("missing", "tp=2", "int8", 80)
    file.write_text('model = "llama-3-8b"\ncluster = "8xH100"\ncompare = ["tp=8", "pp=8"]\n')
    code, out, _ = command("generate", "--config", file, "--json")
    assert code == 0 and "predicted" in json.loads(out)


def test_a_run_writes_the_file_that_it_was_repeated_from(
    ranks_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn from\n" * 200)
    model = catalog()["tiny-llama"].replace(vocab=300, hidden=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32)
    optimizer = OptimizerConfig(lr=0.01, betas=(0.8, 0.9))
    config = configure(model, "dp=1", Workload(8, 2), "text.txt", steps=2, optimizer=optimizer, tensorboard=False)
    text = run_file(config)
    assert f'data = "{tmp_path}/text.txt"' in text
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    Path("run.toml").write_text(text)
    code, out, err = ranks_command("train", "--config", "run.toml", "--json")
    assert code == 0, err
    done = Path(json.loads(out)["out"])
    assert done == Path("runs/tiny-llama-1") and Path(done, "run.toml").read_text() == text
    assert json.loads(Path(done, "run.json").read_text())["config"]["optimizer"]["betas"] == [0.8, 0.9]


def test_models_are_whole_in_a_run_file(tmp_path: Path) -> None:
    """Every model of the catalog, with another name so that it is described by its fields."""
    for name, model in catalog().items():
        if not model.why_not_runnable():
            config = configure(
                model.replace(name="x", attention_dropout=0.0), "dp=1", Workload(8, 1), "stdlib", out="o"
            )
            assert read(run_file(config), tmp_path).model == config.model, name
    assert isinstance(read(run_file(config), tmp_path).model, ModelConfig)


# -- `--set`: whatever value a field is given, a command answers or says in one line why it cannot


COMMANDS = [
    words.split()
    for words in (
        "plan llama-3-8b --cluster 8xH100 --seq 512 --batch 8 --fix tp=2,pp=1,cp=1 --json",
        "estimate llama-3-8b --cluster 8xH100 --layout tp=2,dp=4,zero=1,sp --seq 512 --batch 8",
        "estimate gpt2 --cluster 4xcpu --layout dp=4,zero=3 --seq 64 --batch 4 --json",
    )
]
FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
VALUES = st.sampled_from(
    ["1e20", "1" + "0" * 20, str(2**63 - 1), "9" * 5000, "1000000007", "-1", "0", "1", "2", "3", "0.5", "nan", "inf",
     "-inf", "1e308", "1e-320", "", "none", "true", "all", "alibi", "learned", "layernorm", "gelu"]
) | st.integers().map(str) | st.floats().map(str)  # fmt: skip


def ends(argv: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    said = out.getvalue()
    # With --json a mistake is an object on standard output, too; without, nothing is there.
    wrong = json.loads(said) if code and "--json" in argv else {}
    assert (said == "" or "error" in wrong) == (code != 0)
    return code, err.getvalue()


@given(st.sampled_from(COMMANDS), st.lists(st.tuples(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3))
@settings(max_examples=150)
def test_any_value_of_any_field(command, changes):
    code, told = ends([*command, *(f"--set={field}={value}" for field, value in changes)])
    assert (code, told) == (0, "") or (code == 2 and told.count("\n") == 1 and len(told) < 500)


MIXTURE = ["estimate", "tiny-deepseek", "--cluster", "2xcpu", "--layout", "dp=2,ep=2", "--seq", "64", "--batch", "2"]
PARTS = {"experts": Experts, "latent_attention": LatentAttention}
NESTED = [f"{part}.{field.name}" for part, of in PARTS.items() for field in dataclasses.fields(of)]


@given(st.lists(st.tuples(st.sampled_from([*NESTED, *PARTS]), VALUES), min_size=1, max_size=3))
@settings(max_examples=60)
def test_any_value_of_any_field_of_a_part(changes):
    code, told = ends([*MIXTURE, *(f"--set={field}={value}" for field, value in changes)])
    assert (code, told) == (0, "") or (code == 2 and told.count("\n") == 1 and len(told) < 500)


def test_fields_of_a_part_change_together():
    model = change(get("tiny-deepseek"), "experts.groups=2,experts.active_groups=1,experts.capacity=1.25,hidden=64")
    experts = dataclasses.replace(get("tiny-deepseek").experts, groups=2, active_groups=1, capacity=1.25)
    assert model == get("tiny-deepseek").replace(experts=experts, hidden=64)
    narrow = change(get("tiny-deepseek"), "latent_attention.rope_head_dim=4,latent_attention.q_rank=0")
    assert (narrow.head_dim, narrow.latent_attention.q_rank) == (20, 0)
    assert change(get("deepseek-v3"), "rope_scaling=none").rope_scaling is None
    assert change(get("tiny-mixtral"), "experts=none").experts is None


# -- A limit on open files is one line with its reason


LIMIT = 10


def test_the_command_line_names_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "estimate", "tiny-llama", "--layout", "dp=2", "--seq", "64", "--batch", "4",
         "--cluster", "2xcpu", "--dry-run"],
        capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"shardwise: error: too many open files: a process may open {LIMIT} "
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        RuntimeError("[enforce fail at loop.cc:105] fd_ != -1. epoll_create: Too many open files"),
    ],
)
def test_whoever_meets_the_limit(error: Exception) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert file_limit(error).startswith(f"too many open files: a process may open {most} ")
    assert file_limit(ValueError("too many values")) == ""
