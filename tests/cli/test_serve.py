"""`shardwise serve` refuses what cannot be served, in one line, before anything is loaded."""

import re
import socket
from pathlib import Path

import pytest

from harness.cases import from_table
from harness.command_line import mistake
from shardwise.cli import serve
from shardwise.cli.main import Parser
from shardwise.predict.memory.serving import MemoryFit
from shardwise.runtime import installed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 heads, 2 of keys and values, with a tokenizer of three words."""
    from tokenizers import Tokenizer, models

    from harness.huggingface import pretrained

    folder = tmp_path_factory.mktemp("model")
    pretrained("llama").save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


@from_table
def test_what_cannot_be_served_is_said_in_one_line(command, model, arguments, words):
    code, out, err = command("serve", model, "--port", 0, *arguments)
    # What fits is said before: the mistake is the last line.
    mistake((code, out, err.splitlines(keepends=True)[-1]), *words)


def test_what_does_not_fit_hears_what_would(command, model, monkeypatch):
    monkeypatch.setattr("shardwise.cluster.catalog.machine_memory", lambda: 400_000)
    code, out, err = command("serve", model, "--port", 0, "--batch", "64")
    *fit, refusal = err.splitlines(keepends=True)
    mistake((code, out, refusal), "needs", "more than the 400 kB there are")
    assert any(line.startswith("does not fit") for line in fit) and any("valid tp: 1, 2, 4" in line for line in fit)
    largest = int(re.search(r"the largest context for 64 sequences is (\d+) tokens", refusal)[1])
    for context, fits in ((largest, True), (largest + 1, False)):
        assert fit_of(model, "--batch", "64", "--context", str(context)).fits is fits


def test_a_port_in_use_is_found_before_weights_are_read(command, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = command("serve", model, "--port", taken.getsockname()[1])
    mistake((code, out, err), "cannot be used", "--port")


def test_folders_that_hold_no_model_or_no_tokenizer(command, model, tmp_path):
    mistake(command("serve", tmp_path / "none", "--port", 0), "no such folder")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    mistake(command("serve", tmp_path, "--port", 0), "no tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    mistake(command("serve", tmp_path, "--port", 0), "not a tokenizer.json")
    (tmp_path / "tokenizer.json").write_text((model / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    mistake(command("serve", tmp_path, "--port", 0), "chat template", "damaged")
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-8])
    mistake(command("serve", tmp_path, "--port", 0), "model.safetensors")


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2"])
def test_a_missing_extra_is_named(command, model, package, monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == package else object())
    mistake(command("serve", model), package, "pip install 'shardwise[serve]'")


def fit_of(model: Path, *arguments: str) -> MemoryFit:
    parser = Parser()
    serve.add_arguments(parser)
    return serve.fit_of(serve.job_of(parser.parse_args([str(model), *arguments])))


def test_the_fit_of_a_cache_given_in_bytes_is_that_cache(model):
    one = fit_of(model, "--batch", "1").held.cache
    few = fit_of(model, "--batch", "50", "--cache", str(3 * one + one // 2))
    assert few.held.cache == 3 * one + one // 2 and "cache of 224 tokens" in next(few.lines())
    many = fit_of(model, "--batch", "2", "--cache", "1GB")
    assert many.held.cache == pytest.approx(1e9, rel=1e-4)
    assert many.held.passing == fit_of(model, "--batch", "2").held.passing  # two run, however many it has room for
    far = fit_of(model, "--cache", "99999TB")
    assert not far.fits and re.search(
        r"with a cache of 100 PB needs .*; the largest cache that fits is ", far.refusal()
    )


@pytest.mark.parametrize(("context", "batch"), [(17, 8), (16, 3), (64, 1)])
def test_the_announced_cache_is_the_one_that_will_be_made(model, context, batch):
    """Whole pages for each sequence, and no more sequences than may run."""
    found = fit_of(model, "--context", str(context), "--batch", str(batch))
    one = fit_of(model, "--context", "16", "--batch", "1").held.cache
    assert found.held.cache == batch * -(-context // 16) * one
    assert f"cache of {batch} x {context} tokens" in next(found.lines())
