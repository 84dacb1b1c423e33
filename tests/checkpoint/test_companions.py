"""What lies beside weights, through a run, a resume, a merge and an export: a chat model must still chat."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from harness.huggingface import pretrained
from harness.training_process import shardwise
from shardwise.data import Corpus
from shardwise.data.tokenizer import end_of_text, load
from shardwise.serving.http.chat import Chat
from shardwise.serving.job import tokenizer_of
from shardwise.serving.text import Text

pytestmark = pytest.mark.usefixtures("leftovers")
SPECIAL = ["<eos>", "<bos>", "<end_of_turn>", "</s>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<end_of_turn>{% endfor %}"
FILES = {
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"},
    "special_tokens_map.json": {"eos_token": {"content": "<eos>"}},
    "generation_config.json": {"eos_token_id": [0, 2], "bos_token_id": 1, "temperature": 0.7, "do_sample": True},
    "added_tokens.json": {"<end_of_turn>": 2},
}


def write_base(folder: Path, text: Path) -> None:
    """A chat model in bf16 whose vocabulary has </s> beside its own end of text."""
    made = pretrained("llama", vocab_size=300).to(torch.bfloat16)
    made.config.bos_token_id, made.config.eos_token_id = 1, [0, 2]
    made.save_pretrained(folder)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=300, special_tokens=SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a run of it, one that resumes that elsewhere, and one of adapters; the base has moved since."""
    root = tmp_path_factory.mktemp("companions")
    text = root / "text.txt"
    text.write_text("\n".join(f"line {n} holds {n * n}" for n in range(600)))
    write_base(root / "base", text)
    common = ("--seq", 16, "--batch", 2, "--no-tensorboard", "--validate-batches", 1, "--layout", "precision=fp32")
    train = ("train", "--weights", root / "base", "--data", text, *common, "--steps", 1, "--out")
    shardwise(*train, root / "run")
    shardwise(*train, root / "adapters", "--lora", "rank=2")
    (root / "base").rename(root / "moved")
    shardwise("train", "--resume", root / "run", "--steps", 2, "--out", root / "resumed")
    return root


def assert_chats(folder: Path, base: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", *FILES):
        if name != "generation_config.json":
            assert (folder / name).read_bytes() == (base / name).read_bytes(), name
    assert json.loads((folder / "generation_config.json").read_text()) == FILES["generation_config.json"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["torch_dtype"]) == (1, [0, 2], "bfloat16")
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["run", "resumed"])
def test_an_export_has_what_lay_beside_the_base(folders: Path, tmp_path: Path, name: str) -> None:
    shardwise("checkpoint", "export", folders / name, "--out", tmp_path / "out")
    assert_chats(tmp_path / "out", folders / "moved")


def test_a_merge_has_what_lay_beside_the_base(folders: Path, tmp_path: Path) -> None:
    shardwise("checkpoint", "merge", folders / "adapters", "--base", folders / "moved", "--out", tmp_path / "out")
    assert_chats(tmp_path / "out", folders / "moved")


def test_a_run_is_served_as_its_base(folders: Path) -> None:
    ends = [Text.open(folders / name).stop_tokens for name in ("moved", "run", "resumed")]
    assert ends == [(0, 2)] * 3
    for name in ("run", "resumed"):
        file = tokenizer_of(folders / name)
        assert file is not None
        chat, theirs = Chat(file), Chat(folders / "moved" / "tokenizer.json")
        messages = [{"role": "user", "content": "line 7"}]
        assert chat.known and chat.encode(messages) == theirs.encode(messages)


def test_documents_end_with_the_folders_own_end(folders: Path, tmp_path: Path) -> None:
    (corpus,) = (folders / "corpora").glob("corpus-*")
    assert Corpus.open(corpus).eos == 0
    tokenizer = load(folders / "moved" / "tokenizer.json")
    for files, end in (
        ({}, SPECIAL.index("</s>")),  # the first known name
        ({"special_tokens_map.json": {"eos_token": "<end_of_turn>"}}, 2),
        ({"tokenizer_config.json": {"eos_token": {"content": "<eos>"}}}, 0),
        ({"config.json": {"eos_token_id": 2}}, 2),
        ({"config.json": {"eos_token_id": 77}}, 3),  # a family's default, which is a letter here
        ({"generation_config.json": {"eos_token_id": [2, 0]}, "config.json": {"eos_token_id": 0}}, 2),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        assert end_of_text(tokenizer, folder=folder) == end, files
