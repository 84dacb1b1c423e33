"""Layouts written for other engines and read back: every key that an engine expresses comes back, others are errors."""

from dataclasses import fields, replace

import pytest

from harness.cases import from_table
from harness.emitted import requests
from harness.today import EVERYTHING, seed
from shardwise.cli.show.explain_table import serving
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.interop import WRITERS, WriteRequest, nearest_layout, read, write
from shardwise.interop.reading.settings import ServerSettings
from shardwise.interop.writing.canonical import canonical
from shardwise.interop.writing.writer import forced_layout
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import catalog, get
from shardwise.planner.serving import _RankMemory, _Space
from shardwise.predict.memory.engine_workspace import engine_room
from shardwise.predict.time.profiles import engine as profile_of

COUNT = 500 if EVERYTHING else 40
STEP = Workload(2048, 64)


def round_trip(engine, request, folder):
    """The file's reading, which must know every option."""
    file = write(engine, request)
    path = folder / file.file
    path.write_text(file.text)
    reading = read([str(path)], request.layout.ranks)
    assert not reading.unknown, (reading.unknown, file.text)
    return reading


@pytest.mark.parametrize("engine", WRITERS)
def test_every_expressed_key_comes_back(engine, tmp_path):
    writer = WRITERS[engine]
    seen = set()
    for number, (asked, request) in enumerate(requests(engine, COUNT, f"{seed()}")):
        request = replace(request, version=writer.versions[number % len(writer.versions)])
        if forced_layout(writer, canonical(asked.layout, asked.model), asked.model) != request.layout:
            with pytest.raises(UserError, match="cannot express") as raised:
                write(engine, asked)
            assert f"nearest that it can: {request.layout}" in str(raised.value)
        reading = round_trip(engine, request, tmp_path)
        back = canonical(reading.layout, request.model)
        for key in writer.keys:
            assert getattr(back, key) == getattr(request.layout, key), (key, request.layout, back)
        assert reading.layout.ranks == request.layout.ranks
        assert reading.seq in (None, request.workload.seq)
        if engine != "accelerate":  # Batch and optimizer are the program's.
            assert (reading.batch or 0) == request.workload.batch
            assert (reading.optimizer or "adamw") == request.workload.optimizer
        if request.layout.precision == "bf16":  # Weights in 32 bits are not quantized.
            assert reading.served == request.served
        seen |= {(key, getattr(request.layout, key)) for key in writer.keys}
    assert 2 * len(seen) > 3 * len(writer.keys), "hardly any layout says anything"


def test_what_is_not_written_is_commented(tmp_path):
    request = WriteRequest(get("llama-3-8b"), Layout.parse("dp=8,zero=1,recompute=full,compile=block"), STEP)
    text = write("deepspeed", request).text
    assert "recompute=full: the model's code decides" in text and "compile=block: the program" in text


def test_every_key_is_expressed_commented_or_limited():
    request = WriteRequest(get("llama-3-8b"), Layout(), STEP)
    served = WriteRequest(get("llama-3-8b"), Layout(), served=ServerSettings())
    for name, writer in WRITERS.items():
        limited = {limit.key for limit in writer.bounds}
        sync = {"servers", "staleness", "backup", "damped", "every", "outer", "outer_bits", "moments", "replicas"}
        missing = {field.name for field in fields(Layout)} - limited - set(writer.keys) - set(writer.left) - sync
        assert not missing, (name, missing)
        assert not set(writer.keys) & set(writer.left), name
        layout = nearest_layout(name, served if writer.serves else request)
        assert layout in (Layout(), Layout(grads="fp32")), name


@pytest.mark.parametrize("engine", [name for name, writer in WRITERS.items() if name == "megatron"])
def test_models_come_back(engine, tmp_path):
    told = 0
    for model in catalog().values():
        request = WriteRequest(model, Layout(attention="math" if model.attention_dropout else "sdpa"), STEP)
        request = replace(request, workload=Workload(min(2048, model.max_positions), 64))
        if WRITERS[engine].objection(model):
            with pytest.raises(UserError, match=f"cannot express {model.name}"):
                write(engine, request)
            continue
        described = round_trip(engine, request, tmp_path).described
        told += 1
        if model.experts:
            sizes = [(e.count, e.active, e.ffn, e.shared, e.dense_layers) for e in (model.experts, described.experts)]
            assert sizes[0] == sizes[1], model.name
        for key in (
            "vocab",
            "hidden",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "norm",
            "tied",
            "bias",
            "latent_attention",
        ):
            assert getattr(described, key) == getattr(model, key), (key, model.name)
    assert told > 10


@from_table
def test_what_an_engine_cannot_express_is_one_line(engine, layout, line):
    served = WRITERS[engine].serves
    request = WriteRequest(
        get("llama-3-8b"), Layout.parse(layout), Workload() if served else STEP, ServerSettings() if served else None
    )
    if line == "dp=2":  # A second copy over all ranks is none.
        assert str(write(engine, request).layout) == "dp=2,zero=3"
        return
    with pytest.raises(UserError, match=line) as raised:
        write(engine, request)
    assert "\n" not in str(raised.value)


def test_training_and_serving_are_told_apart():
    model = get("llama-3-8b")
    with pytest.raises(UserError, match="vLLM serves: give --prompt"):
        write("vllm", WriteRequest(model, Layout(), STEP))
    with pytest.raises(UserError, match="Megatron-LM trains: give --seq"):
        write("megatron", WriteRequest(model, Layout(), served=ServerSettings()))
    with pytest.raises(UserError, match="DeepSpeed trains and needs --seq and --batch"):
        write("deepspeed", WriteRequest(model, Layout()))
    with pytest.raises(UserError, match="no engine 'megatro'; did you mean megatron"):
        write("megatro", WriteRequest(model, Layout(), STEP))
    with pytest.raises(UserError, match="no version '9' of vLLM"):
        write("vllm", WriteRequest(model, Layout(), served=ServerSettings(), version="9"))


def test_ranks_fill_nodes():
    request = WriteRequest(get("llama-3-8b"), Layout(dp=16), STEP)
    assert "--nnodes 2" in write("megatron", request).text
    with pytest.raises(UserError, match="12 ranks do not fill nodes of 8"):
        write("megatron", replace(request, layout=Layout(dp=12), workload=Workload(2048, 24)))


@from_table
def test_a_key_with_one_value_gets_it_with_a_comment(engine, model, layout, written, comment):
    request = WriteRequest(get(model), Layout.parse(layout), STEP)
    if WRITERS[engine].serves:
        request = replace(request, workload=Workload(), served=ServerSettings())
    file = write(engine, request)
    assert str(file.layout) == written and f"{comment}: {WRITERS[engine].title} has no other" in file.comments


@pytest.mark.parametrize("engine", [name for name, writer in WRITERS.items() if writer.serves])
def test_a_server_read_back_needs_what_the_planner_counts(engine, tmp_path):
    cluster, profile = Cluster.parse("8x8xB300"), profile_of(WRITERS[engine].profile)
    room, seen = engine_room(cluster, profile), set()
    for asked, request in requests(engine, COUNT, f"memory {seed()}"):
        if asked.layout.precision != "bf16":
            continue
        work = Workload(prompt=3072, output=1024, concurrency=64)
        space = _Space(request.model, cluster, work, profile, room, kv_cache=request.served.cache or "bf16")
        weights = request.served.weights
        cache = space.cache_of(weights)
        served = replace(request.served, cache="" if cache == "bfloat16" else cache, tokens=profile.most_tokens)
        served = replace(served, memory=profile.cache_share)
        reading = round_trip(engine, replace(request, served=served, cluster=cluster), tmp_path)
        _, held, workspace, token = _RankMemory(space, request.layout, weights).row(served.sequences)
        read = serving(reading, request.model.replace(attention_dropout=0.0), cluster)
        assert (read.weights, read.workspace, read.a_token) == (int(held), workspace, token), request.layout
        seen.add(read.weights)
    assert len(seen) > 4
