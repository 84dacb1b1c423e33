"""Hugging Face folders without torch: every piece of every family, what is refused and how, how little is read."""

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from simulated import LLAMA, layouts_of, load_rank, same_bits, save, state_of

from harness.cases import from_table
from shardwise.checkpoint import Piece, needs, shapes
from shardwise.checkpoint.dtypes import convert
from shardwise.checkpoint.huggingface import HuggingFaceWeights, export, exporting, open_weights, tensor_file
from shardwise.checkpoint.huggingface import exporting as bands
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.config import Experts, LatentAttention

GPT2 = ModelConfig(
    "gpt2", vocab=53, hidden=24, layers=2, heads=4, ffn=47, max_positions=16, norm="layernorm", positions="learned",
    activation="gelu_tanh", gated=False, bias="all", tied=True,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "qwen2": LLAMA.replace(bias="qkv"),
    "qwen3": LLAMA.replace(hidden=24, heads=6, head_dim=6, kv_heads=1, ffn=41, qk_norm=True, tied=True),
    "gpt2": GPT2,
    "gpt_neox": GPT2.replace(positions="rope", tied=False, parallel_residual=True),
    "mixtral": LLAMA.replace(ffn=14, experts=Experts(4, 2, 14)),
    "qwen3_moe": LLAMA.replace(qk_norm=True, tied=True, experts=Experts(8, 3, 10)),
    "deepseek_v3": LLAMA.replace(
        kv_heads=4,
        head_dim=0,
        norm_eps=1e-6,
        experts=Experts(4, 2, 14, shared=1, dense_layers=1, router_bias=True, scoring="sigmoid"),
        latent_attention=LatentAttention(10, 9, nope_head_dim=5, rope_head_dim=6, v_head_dim=7),
    ),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write(folder: Path, model: ModelConfig, dtype: str = "float32", **options) -> dict[str, np.ndarray]:
    """A folder of the model's weights; returns them."""
    state = state_of(model, kinds=("model",))
    export(save(folder.with_name(f"{folder.name}-step-1"), model, "tp=2,dp=2,zero=1", state), folder, dtype, **options)
    return state


def change(folder: Path, how: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    how(tensors)
    save_file(tensors, folder / SINGLE)


def mistake(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 4000}], ids=["single", "indexed"])
@pytest.mark.parametrize("name", MODELS)
def test_any_rank_of_any_layout_gets_its_own(name, options, tmp_path, monkeypatch):
    model = MODELS[name]
    monkeypatch.setattr(bands, "BAND", 700)
    monkeypatch.setattr(tensor_file, "BAND", 300)
    state = write(tmp_path / "folder", model, **options)
    assert (tmp_path / "folder" / SINGLE).exists() != bool(options)
    weights = open_weights(tmp_path / "folder", model)
    weights.require(shapes(model, ("model",)))
    checkpoint = save(tmp_path / "step-1", model, "dp=1", state)
    assert {name: spec.dtype for name, spec in weights.tensors.items()} == dict.fromkeys(state, "float32")
    for text in layouts_of(model):
        layout = Layout.parse(text)
        for rank in range(layout.ranks):
            got, expected = (load_rank(source, model, layout, rank, "model") for source in (weights, checkpoint))
            assert got.keys() == expected.keys()
            assert all(same_bits(got[unit], expected[unit]) for unit in got), (text, rank)


def test_files_are_as_large_as_asked_for(tmp_path):
    state = write(tmp_path / "folder", LLAMA, max_shard_bytes=9000)
    index = json.loads((tmp_path / "folder" / INDEX).read_text())
    files = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    sizes = [[v.nbytes for v in load_file(file).values()] for file in files]
    assert all(sum(size) <= 9000 or len(size) == 1 for size in sizes) and len(files) > 2
    assert index["metadata"]["total_size"] == sum(map(sum, sizes)) == sum(v.nbytes for v in state.values())
    assert index["weight_map"] == {name: f.name for f in files for name in load_file(f)}


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_dtypes(stored, tmp_path):
    write(tmp_path / "folder", LLAMA, "bfloat16" if stored == "bfloat16" else "float32")
    if stored != "bfloat16":
        change(tmp_path / "folder", lambda t: t.update({k: v.astype(stored) for k, v in t.items()}))
    weights, name = HuggingFaceWeights.open(tmp_path / "folder"), "model/embedding.tokens.weight"
    assert weights.tensors[name].dtype == stored
    values = state_of(LLAMA, kinds=("model",))[name].reshape(-1)
    there = convert(values, "float32", stored)
    for dtype in ("float32", "bfloat16", "float64"):
        assert same_bits(weights.read(name, dtype=dtype), convert(there, stored, dtype))


@pytest.fixture
def bytes_read(monkeypatch):
    counted, preadv = [], os.preadv

    def counting(handle, buffers, offset):
        counted.append(preadv(handle, buffers, offset))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counted


def test_only_what_a_rank_needs_is_read(tmp_path, bytes_read):
    """GPT-2's fused, transposed matrices: rows wider than a page, so that columns can be left out."""
    model = GPT2.replace(hidden=1024, ffn=2048, layers=1, heads=4, head_dim=256)
    write(tmp_path / "folder", model)
    weights = HuggingFaceWeights.open(tmp_path / "folder")
    for rank in range(4):
        bytes_read.clear()
        held = [h for h in needs(model, Layout.parse("tp=4"), rank) if h.name.endswith("qkv.k.weight")]
        for each in held:
            weights.read(f"model/{each.name}", each.local)
        assert sum(bytes_read) == sum(each.stored.numel for each in held) * 4 == 1024 * 256 * 4


def test_a_rank_reads_its_own_experts_alone(tmp_path, bytes_read):
    model = MODELS["mixtral"].replace(
        hidden=512, ffn=1024, layers=1, heads=4, head_dim=128, experts=Experts(4, 2, 1024)
    )
    write(tmp_path / "folder", model)
    weights = HuggingFaceWeights.open(tmp_path / "folder")
    for rank in range(2):
        bytes_read.clear()
        held = [h for h in needs(model, Layout.parse("dp=2,ep=2"), rank) if ".experts." in h.name]
        for each in held:
            weights.read(f"model/{each.name}", each.local)
        assert sum(bytes_read) == sum(each.stored.numel for each in held) * 4 == 3 * 2 * 512 * 1024 * 4


def _stacked(tensors):
    """Mixtral's experts as transformers has them in memory, and its router's name there."""
    for block in range(2):
        at, theirs = f"model.layers.{block}.mlp.", f"model.layers.{block}.block_sparse_moe."
        gate, down, up = ([tensors.pop(f"{theirs}experts.{e}.w{n}.weight") for e in range(4)] for n in (1, 2, 3))
        tensors[f"{at}experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
        tensors[f"{at}experts.down_proj"] = np.stack(down)
        tensors[f"{at}gate.weight"] = tensors.pop(f"{theirs}gate.weight")


def test_experts_in_one_tensor(tmp_path):
    folder, model = tmp_path / "folder", MODELS["mixtral"]
    state = write(folder, model)
    change(folder, _stacked)
    weights = HuggingFaceWeights.open(folder)
    assert all(same_bits(weights.read(name), values.reshape(-1)) for name, values in state.items())
    name, part = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    for shape in ((2, 56, 32), (4, 28 * 32), (8, 14, 32)):
        change(folder, lambda t, s=shape: t.update({name: t[name].reshape(s)}))
        mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, name, "not a matrix for each of 4 experts")
    change(folder, lambda t: t.update({name: t[name].reshape(4, 32, 28)}))
    mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, name, "(16, 28)", "(14, 32)")
    change(folder, lambda t: t.pop(name))
    mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, part.replace("experts.2", "experts.0"))


def test_a_missing_expert_is_named(tmp_path):
    folder, name = tmp_path / "folder", "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    write(folder, MODELS["mixtral"])
    change(folder, lambda t: t.pop(name))
    mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, f"lacks {name}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, "shape (4, 32), not the model's (3, 32)")


def test_the_bias_of_a_router_keeps_its_steps(tmp_path):
    """A step of 0.001 is lost in bfloat16."""
    state = write(tmp_path / "folder", MODELS["deepseek_v3"], "bfloat16")
    weights, name = HuggingFaceWeights.open(tmp_path / "folder"), "model/blocks.1.mlp.router.bias"
    assert {key for key, spec in weights.tensors.items() if spec.dtype == "float32"} == {name}
    assert same_bits(weights.read(name), state[name])


def test_options_of_training_may_differ(tmp_path):
    """They say nothing about the weights; others of the experts do."""
    model = MODELS["mixtral"]
    write(tmp_path / "folder", model)
    open_weights(tmp_path / "folder", model.replace(experts=replace(model.experts, balance_loss=0.1, capacity=1.5)))
    other = model.replace(experts=replace(model.experts, active=1))
    mistake(lambda: open_weights(tmp_path / "folder", other), "its experts is")


def test_memory_is_bounded(tmp_path, monkeypatch):
    model = GPT2.replace(hidden=512, ffn=4096, layers=1, head_dim=128)
    state = state_of(model, kinds=("model",))
    checkpoint = save(tmp_path / "step-1", model, "dp=1", state)
    del state
    largest = 4 * 512 * 4096
    monkeypatch.setattr(bands, "BAND", 1 << 18)
    monkeypatch.setattr(tensor_file, "BAND", 1 << 18)
    tracemalloc.start()
    try:
        export(checkpoint, tmp_path / "folder", "float32")
        weights = HuggingFaceWeights.open(tmp_path / "folder")
        for name, spec in weights.tensors.items():
            shape = spec.shape
            weights.read(name, Piece(tuple((0, n) for n in shape), 0, min(spec.numel, 1000)), "bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < largest / 2


def test_the_old_names_of_gpt2(tmp_path):
    """The published gpt2: no prefix, and the masks of attention beside the weights."""
    folder = tmp_path / "folder"
    state = write(folder, GPT2)

    def old(tensors):
        new = {name.removeprefix("transformer."): values for name, values in tensors.items()}
        masks = {f"h.{i}.attn.bias": np.ones((1, 1, 16, 16), np.bool_) for i in range(2)}
        tensors.clear()
        tensors.update(new | masks)

    change(folder, old)
    weights = open_weights(folder, GPT2)
    assert all(same_bits(weights.read(name), values.reshape(-1)) for name, values in state.items())


def test_a_tied_head_that_is_stored_too(tmp_path):
    folder = tmp_path / "folder"
    state = write(folder, GPT2)
    name, table = "model/embedding.tokens.weight", "transformer.wte.weight"
    change(folder, lambda t: t.update({"lm_head.weight": t[table].copy()}))
    assert same_bits(HuggingFaceWeights.open(folder).read(name), state[name].reshape(-1))
    change(folder, lambda t: t["lm_head.weight"].__setitem__((7, 3), 5.0))
    weights = HuggingFaceWeights.open(folder)
    weights.read(name, Piece(((0, 7), (0, 24)), 0, 100))
    mistake(lambda: weights.read(name), SINGLE, "lm_head.weight", "tie_word_embeddings")
    change(folder, lambda t: t.pop(table))
    assert HuggingFaceWeights.open(folder).read(name)[7 * 24 + 3] == 5.0


NAME = "model.layers.1.mlp.up_proj.weight"
WRONG = {
    "missing": (lambda t: t.pop(NAME), [SINGLE, NAME]),
    "unknown": (lambda t: t.update(extra=t[NAME]), [SINGLE, "extra"]),
    "turned": (lambda t: t.update({NAME: t[NAME].T.copy()}), [SINGLE, NAME, "(32, 43)", "(43, 32)"]),
    "integers": (lambda t: t.update({NAME: np.zeros((43, 32), np.int8)}), [SINGLE, NAME, "I8"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_tensor_is_named(kind, tmp_path):
    write(tmp_path / "folder", LLAMA)
    how, words = WRONG[kind]
    change(tmp_path / "folder", how)
    mistake(lambda: HuggingFaceWeights.open(tmp_path / "folder"), *words)


def test_wrong_files_are_named(tmp_path):
    folder = tmp_path / "folder"
    mistake(lambda: HuggingFaceWeights.open(folder), "no such folder")
    write(folder, LLAMA, max_shard_bytes=9000)
    index, second = json.loads((folder / INDEX).read_text()), sorted(folder.glob("model-*"))[1]
    whole = second.read_bytes()

    for at in (0, 5, 100, len(whole) - 1):
        second.write_bytes(whole[:at])
        mistake(lambda: HuggingFaceWeights.open(folder), second.name, "cut short")
    second.unlink()
    mistake(lambda: HuggingFaceWeights.open(folder), second.name, "missing")
    second.write_bytes(whole)
    weights = HuggingFaceWeights.open(folder)
    second.write_bytes(whole[:200])
    mistake(lambda: [weights.read(name) for name in weights.tensors], second.name, "cut short", "model.")
    second.write_bytes(whole)

    for weight_map in (None, [], {NAME: "../x.safetensors"}, {NAME: 3}):
        (folder / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))
        mistake(lambda: HuggingFaceWeights.open(folder), INDEX, "weight_map")
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"extra": second.name}}))
    mistake(lambda: HuggingFaceWeights.open(folder), second.name, "extra")
    (folder / INDEX).write_text("{")
    mistake(lambda: HuggingFaceWeights.open(folder), INDEX, "JSON")
    (folder / INDEX).unlink()
    mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, INDEX)


def test_weights_of_another_model(tmp_path):
    write(tmp_path / "folder", LLAMA)
    for field, value in {"rope_theta": 5e5, "heads": 2, "norm_eps": 1e-6, "ffn": 44, "tied": True}.items():
        mistake(lambda f=field, v=value: open_weights(tmp_path / "folder", LLAMA.replace(**{f: v})), f"its {field} is")
    weights = open_weights(tmp_path / "folder", LLAMA.replace(name="x", attention_dropout=0.1, max_positions=9))
    wanted = shapes(LLAMA, ("model",))
    mistake(lambda: weights.require(wanted | {"first/head.norm.weight": (32,)}), "first/head.norm.weight")
    mistake(lambda: weights.require(wanted | {"model/head.norm.weight": (33,)}), SINGLE, "model.norm.weight", "(33,)")
    mistake(lambda: weights.require({k: v for k, v in wanted.items() if "mlp.down" not in k}), SINGLE, "down_proj")


def test_export_overwrites_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    checkpoint = save(tmp_path / "step-1", LLAMA, "dp=1", state_of(LLAMA))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a").write_text("mine")
    for target in ("used", "used/a"):
        mistake(lambda t=target: export(checkpoint, tmp_path / t), "nothing was overwritten")
    mistake(lambda: export(checkpoint, tmp_path / "used/a/b"), "cannot write")
    mistake(lambda: export(checkpoint, tmp_path / "out", "int8"), "int8")
    with monkeypatch.context() as patch:
        # Somebody else makes a file while the weights are written.
        header = exporting.safetensors_header
        patch.setattr(
            exporting,
            "safetensors_header",
            lambda *of: (tmp_path / "out" / "config.json").write_text("another's") and header(*of),
        )
        mistake(lambda: export(checkpoint, tmp_path / "out"), "cannot write", "File exists")
    assert [(f.name, f.read_text()) for f in (tmp_path / "out").iterdir()] == [("config.json", "another's")]
    (tmp_path / "out" / "config.json").unlink()
    part = tmp_path / "step-1" / "rank-00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-LLAMA.hidden * 4] ^= 1
    data[len(data) // 2] ^= 1
    data[len(data) // 6] ^= 1
    part.write_bytes(data)
    mistake(lambda: export(checkpoint, tmp_path / "out", max_shard_bytes=9000), part.name, "damaged")
    assert not (tmp_path / "out").exists() and (tmp_path / "used" / "a").read_text() == "mine"
    lost = LLAMA.replace(dropout=0.1)
    mistake(lambda: export(save(tmp_path / "s", lost, "dp=1", state_of(lost)), tmp_path / "out"), "Hugging Face")


def test_more_layers_than_tensors_are_not_even_counted(tmp_path):
    write(tmp_path / "folder", LLAMA)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12}))
    mistake(lambda: HuggingFaceWeights.open(tmp_path / "folder"), SINGLE, "too few for the 1,000,000,000,000 layers")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b", "../a", "", 3, None])
def test_a_weight_map_names_files_beside_it(name, tmp_path):
    write(tmp_path / "folder", LLAMA, max_shard_bytes=9000)
    index = json.loads((tmp_path / "folder" / INDEX).read_text())
    (tmp_path / "folder" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(index["weight_map"], name)}))
    mistake(lambda: HuggingFaceWeights.open(tmp_path / "folder"), INDEX, "no weight_map from tensors to files")


@from_table
def test_the_token_that_ends_answers_is_the_tokenizers_own(tokenizer, end, tmp_path):
    """And none where it is not known, rather than the family's."""
    (tmp_path / "corpus").mkdir()
    if tokenizer is not None:
        (tmp_path / "corpus" / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = save(tmp_path / "s", LLAMA, "dp=1", state_of(LLAMA, kinds=("model",)), corpus=str(tmp_path / "corpus"))
    files = export(run, tmp_path / "out").files
    assert ("tokenizer.json" in files) == (tokenizer is not None)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((tmp_path / "out" / name).read_text())
        assert (told["bos_token_id"], told["eos_token_id"]) == (None, end)
    assert HuggingFaceWeights.open(tmp_path / "out").model == LLAMA.replace(name="out")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("mutated") / "folder"
    write(folder, LLAMA)
    return folder, (folder / SINGLE).read_bytes()


@given(data=st.data())
def test_a_changed_header_is_refused_or_harmless(sound, data):
    """Never a traceback, never more memory than the file has bytes."""
    folder, whole = sound
    length = int.from_bytes(whole[:8], "little")
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    (folder / SINGLE).write_bytes(changed)
    try:
        weights = HuggingFaceWeights.open(folder)
        for name in weights.tensors:
            weights.read(name)
    except UserError as error:
        assert "\n" not in str(error)


def test_tensors_that_share_bytes_are_refused(sound):
    """Alone each is within the file and as long as its shape: no other check finds them."""
    folder, whole = sound
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    norms = [name for name in header if name.endswith("layernorm.weight")]
    first, second = norms[:2]
    for shift in (0, 2):
        start, end = header[first]["data_offsets"]
        changed = header | {second: header[second] | {"data_offsets": [start + shift, end + shift]}}
        text = json.dumps(changed).encode()
        (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
        mistake(lambda: HuggingFaceWeights.open(folder), SINGLE, first, second, "share bytes")


def test_a_header_as_deep_as_it_is_long(sound):
    folder, _ = sound
    for text in (b"[" * 5000, b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'):
        (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(100))
        mistake(lambda: HuggingFaceWeights.open(folder), SINGLE)
