"""Every entry's parameter count against the published one; names, nearest names, paths."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import table
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get, resolve
from shardwise.model.huggingface import to_huggingface
from shardwise.model.parameters import count

PROMISED = """
    gpt3-175b megatron-22b megatron-175b megatron-530b megatron-1t mt-nlg-530b bloom-176b llama-2-7b llama-2-13b
    llama-2-70b llama-3-8b llama-3-70b llama-3-405b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b
    mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v2-lite deepseek-v2 deepseek-v3 gpt2 gpt2-xl mistral-7b
    tiny-llama tiny-gpt tiny-mixtral tiny-qwen3-moe tiny-deepseek
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", catalog())
def test_parameter_count_is_the_published_one(name):
    config = get(name)
    published = config.published_params
    if name.startswith("tiny-"):
        assert published is None
        assert count(config) < 2e6, "small enough for a laptop"
    elif isinstance(published, int):
        assert count(config) == published
    else:
        assert count(config) == pytest.approx(published, rel=0.005), "the papers round to two or three digits"


def test_the_promised_models_are_there_under_their_own_names():
    assert set(PROMISED) <= catalog().keys()
    assert all(name == config.name == name.lower() for name, config in catalog().items())


def test_runnable_or_counted():
    counted = {name for name, config in catalog().items() if config.why_not_runnable()}
    assert counted == {"bloom-176b"}


def test_callers_cannot_change_the_catalog():
    catalog().clear()
    assert catalog()


@pytest.mark.parametrize("name", catalog())
def test_description_survives_json(name):
    assert ModelConfig.from_json(json.loads(json.dumps(get(name).to_json()))) == get(name)


def test_names_in_any_case():
    assert get(" Llama-3-8B ") is get("llama-3-8b") is resolve("LLAMA-3-8B")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("lama-3-70b", "llama-3-70b"), ("gpt-2", "gpt2"), ("Qwen/Qwen3-8", "qwen3-8b"), ("mixtral", "mixtral-8x7b")],
)
def test_unknown_name_brings_the_nearest(wrong, meant):
    for find in (get, resolve):
        with pytest.raises(UserError, match=meant) as caught:
            find(wrong)
        assert "\n" not in str(caught.value)


@given(name=st.text())
def test_any_other_text_is_refused_in_one_line(name):
    if name.strip().lower() not in catalog():
        with pytest.raises(UserError) as caught:
            get(name)
        assert "\n" not in str(caught.value)


def test_resolve_reads_files_and_folders(tmp_path, monkeypatch):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    config = get("tiny-gpt").replace(name="gpt2")
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))
    assert resolve(str(folder)) == resolve(str(folder / "config.json")) == config
    monkeypatch.chdir(tmp_path)
    assert resolve("./gpt2") == config
    assert resolve("gpt2") == get("gpt2"), "the catalog goes first"


@pytest.mark.parametrize("text", ["", " ", "no/such/folder"])
def test_resolve_refuses_what_is_neither(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="neither in the catalog"):
        resolve(text)
    for path in ("./nothing", "/nothing/config.json", "../nothing", "config.json"):
        with pytest.raises(UserError, match=r"^no such file or folder: "):
            resolve(path)


HUB = table(__file__, "HUB")


@pytest.mark.parametrize(("name", "known"), HUB.items())
def test_names_of_the_hub_without_a_cache_are_the_catalogs(name, known, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert resolve(name) is get(known)


def test_a_name_of_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--Qwen--Qwen2.5-32B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    config = get("tiny-gpt").replace(name="abc")
    (snapshot / "config.json").write_text(json.dumps(to_huggingface(config)))
    assert resolve("Qwen/Qwen2.5-32B") == config.replace(name="Qwen/Qwen2.5-32B")
