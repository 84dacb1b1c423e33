import random

import pytest

from harness.cases import from_table
from harness.today import seed
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.planner import plan
from shardwise.planner.exact import ExactMemory
from shardwise.planner.ranking import bound_of
from shardwise.planner.runnable import space_for
from shardwise.predict import estimate
from shardwise.predict.memory.capacity import usable_bytes
from shardwise.predict.memory.engine_bytes import in_flight, widths_of
from shardwise.predict.memory.engine_rows import _table, engine_memory
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.schedule.pipeline import build
from shardwise.validation import scoreboard

HELD_OUT = {"torchtitan": 15, "torchao": 8, "megatron-bridge-sft": 4, "nanotron": 6, "torchtune-lora": 4}
"""Source -> published rows that the table of engines was not read from."""
NVIDIA = "tp=8,pp=8,cp=2,dp=8,virtual=8,schedule=interleaved,sp,zero=1"
"""Llama 3.1 405B on 1,024 H100: NVIDIA-NeMo/Megatron-Bridge, perf_recipes/llama/h100/llama31.py."""
META = "tp=8,pp=16,dp=128,virtual=8,schedule=interleaved,sp,zero=2"
"""Llama 3 405B on 16,384 H100: Llama team 2024, section 3.3.2 and table 4."""
SFT = "tp=4,pp=4,dp=2,virtual=5,schedule=interleaved,sp,zero=1,recompute=selective"
"""Llama 3 70B on 32 H100 in FP8: NVIDIA-NeMo/Megatron-Bridge, skills/nemo-mbridge-perf-memory-tuning/card.yaml."""


@pytest.fixture(scope="module")
def scores():
    return {score.source: score for score in scoreboard.memory_scores(scoreboard.read(scoreboard.MEMORY))}


@pytest.mark.parametrize("source", HELD_OUT)
def test_published_peaks_that_the_table_was_not_read_from(scores, source):
    score = scores[source]
    assert sum(not one.read for one in score.rows) == HELD_OUT[source]
    assert score.held_out_error <= 0.1, [f"{one.row['source']}: {one.error:+.1%}" for one in score.rows]


def peaks(name, layout, workload, engine, **settings):
    report = estimate(get(name), Layout.parse(layout), workload, engine=engine, settings=EngineSettings(**settings))
    return [role.bytes.total for role in report.roles]


@from_table
def test_layouts_of_published_405b_runs_fit_as_they_did(layout, batch, engine):
    usable = usable_bytes(Cluster.parse("8x8xH100"))
    assert max(peaks("llama-3-405b", layout, Workload(8192, batch), engine)) <= usable
    assert max(peaks("llama-3-405b", layout, Workload(8192, batch), None)) > usable, "what this runtime saves does not"


def test_the_rank_that_writes_the_log_holds_what_was_measured():
    *_, last = peaks("llama-3-70b", SFT, Workload(4096, 32), "megatron-bridge", precision="fp8")
    assert last == pytest.approx(58.8e9, rel=0.05)


@pytest.mark.parametrize("settings", [EngineSettings(), EngineSettings("fp8", layers=2)], ids=("usual", "fp8"))
@pytest.mark.parametrize(
    ("name", "text", "engine"),
    [("llama-3-8b", "8xH100", "torchtitan"), ("mixtral-8x7b", "4x8xH100", "megatron-bridge"),
     ("deepseek-v3", "64x8xH100", "megatron-core"), ("llama-3-70b", "8x8xH100", "unknown")],
)  # fmt: skip
def test_columns_of_a_search_have_the_bytes_of_single_layouts(name, text, engine, settings):
    if engine == "torchtitan" and settings.layers:
        settings = EngineSettings("fp8")
    model, cluster, draw = get(name), Cluster.parse(text), random.Random(f"{name} {seed()}")
    workload = Workload(4096, 1024 if name == "deepseek-v3" else 128)
    space, _ = space_for(model, cluster, workload, engine, {}, settings)
    exact = ExactMemory(model, workload, cluster, engine=engine, settings=settings)
    bound = bound_of(space)
    for frame in draw.sample(space.frames, min(6, len(space.frames))):
        found = bound.total(frame)
        for _ in range(4):
            row, sharding, order = (draw.randrange(size) for size in frame.shape)
            if frame.possible[row][order]:
                layout = frame.layout(frame.rows[row], frame.shardings[sharding], frame.orders[order])
                assert exact.of(layout).bytes.total == found[row, sharding, order], str(layout)


def test_a_plan_shows_the_bytes_of_estimate():
    best = plan("llama-3-8b", "8xH100", Workload(8192, 64), engine="torchtitan", top=1, explain=False).winner
    report = estimate("llama-3-8b", best.layout, Workload(8192, 64), "8xH100", engine="torchtitan")
    assert best.held == max((role.bytes for role in report.roles), key=lambda held: held.total)


def test_a_plan_that_recomputes_some_layers_is_that_of_estimate():
    some, workload = EngineSettings(layers=2), Workload(8192, 64)
    best = plan("llama-3-8b", "8xH100", workload, engine="megatron-core", top=1, explain=False, settings=some).winner
    report = estimate("llama-3-8b", best.layout, workload, "8xH100", engine="megatron-core", settings=some)
    assert best.layout.recompute == "none"
    assert best.held == max((role.bytes for role in report.roles), key=lambda held: held.total)
    assert report.time == pytest.approx(best.seconds)
    seconds = [
        estimate(
            "llama-3-8b", best.layout, workload, "8xH100", engine="megatron-core", settings=EngineSettings(layers=n)
        ).time
        for n in (0, 2, 32)
    ]
    full = estimate("llama-3-8b", f"{best.layout},recompute=full", workload, "8xH100", engine="megatron-core").time
    assert seconds == sorted(seconds) and seconds[0] < seconds[1] and seconds[2] == pytest.approx(full)


def test_optimizers_of_other_engines():
    layout, seq, batch = "tp=8,pp=4,dp=2,sp,zero=1", 4096, 64
    states = {
        name: estimate("llama-3-70b", layout, Workload(seq, batch, optimizer=name), engine="megatron-core")
        .roles[1]
        .bytes
        for name in ("adamw", "momentum", "muon")
    }
    assert states["muon"].optimizer == states["momentum"].optimizer, "a rank with blocks alone"
    assert states["muon"].optimizer == pytest.approx(2 / 3 * states["adamw"].optimizer)
    eight, four = (
        estimate("llama-3.2-3b", "recompute=full", Workload(seq, 1, optimizer=name), engine="torchtune").roles[0].bytes
        for name in ("adamw8bit", "adamw")
    )
    assert eight.optimizer == pytest.approx(four.optimizer * (1 + 4 / 256) / 2, rel=1e-6)


@pytest.mark.parametrize("engine", [None, "torchtitan"])
def test_an_optimizer_that_the_software_has_not_is_rejected_in_one_line(engine):
    who = "torchtitan has adamw, momentum, sgd" if engine else "this runtime updates with adamw, momentum, sgd"
    for ask in (lambda w: plan("llama-3-8b", "8xH100", w, engine=engine), lambda w: estimate(
        "llama-3-8b", "dp=8", w, "8xH100", engine=engine)):  # fmt: skip
        with pytest.raises(UserError, match=f"^optimizer=muon: {who}[^\n]*$"):
            ask(Workload(2048, 64, optimizer="muon"))


def test_a_plan_in_fp8_is_that_of_estimate_and_faster():
    narrow, workload = EngineSettings("fp8"), Workload(4096, 128)
    chosen = {"engine": "megatron-bridge", "top": 1, "explain": False}
    wide = plan("llama-3-8b", "8xH100", workload, **chosen).winner
    best = plan("llama-3-8b", "8xH100", workload, **chosen, settings=narrow).winner
    report = estimate("llama-3-8b", best.layout, workload, "8xH100", engine="megatron-bridge", settings=narrow)
    assert best.held == max((role.bytes for role in report.roles), key=lambda held: held.total)
    assert report.time == pytest.approx(best.seconds) and best.seconds < 0.8 * wide.seconds


def test_memory_of_this_runtime_is_what_it_was():
    layout, workload = Layout.parse("dp=4,tp=2,sp,zero=1"), Workload(2048, 16)
    named = estimate(get("llama-3-8b"), layout, workload, "8xH100", engine="shardwise")
    assert named.roles == estimate(get("llama-3-8b"), layout, workload, "8xH100").roles


def test_what_an_engine_has_no_rows_for_is_counted_as_this_runtime_s():
    layout, workload = Layout.parse("dp=8,zero=3,hpz=4"), Workload(2048, 16)
    report = estimate(get("llama-3-8b"), layout, workload, "8xH100", engine="torchtitan")
    assert report.roles == estimate(get("llama-3-8b"), layout, workload, "8xH100").roles
    assert any(note.startswith("memory is this runtime's: hpz=4 is not known") for note in report.notes)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4)])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule, virtual, pp):
    for micro in (pp, 2 * pp, 4 * pp):
        actions = build(schedule, pp, micro, virtual).actions
        for place in range(pp):
            held, most = [0] * virtual, 0
            for action in actions[place]:
                for part in action.parts or (action,):
                    held[part.stage // pp] += {"F": 1, "B": -1}.get(part.kind, 0)
                most = max(most, sum(held))
            assert sum(in_flight(schedule, pp, micro, virtual, place)) == most, (micro, place)


@pytest.mark.parametrize("name", list(_table()))
def test_every_number_of_the_table_says_where_it_is_read(name):
    memory, widths = engine_memory(name), set(widths_of(unit_plan(get("mixtral-8x7b"), Layout(), Workload(512, 1))))
    fields = set(memory.__dataclass_fields__) - {"name", "rows", "facts"}
    assert fields <= set(memory.facts) and all(memory.facts.values())
    for rows in memory.rows.values():
        for tensor, row in rows.items():
            assert row.source, (name, tensor)
            assert all(word.isdigit() or word in widths for word in row.size), (name, tensor)
            assert row.freed_by <= set(engine_memory("megatron-core").modules) | {"operations"}, (name, tensor)
            assert row.modes <= {"none", "selective"}, (name, tensor)


def test_recomputing_more_holds_less():
    layout, workload = "tp=8,pp=4,dp=2,sp,zero=1", Workload(8192, 64)
    some = [max(peaks("llama-3-70b", layout, workload, "megatron-core", layers=n)) for n in (0, 5, 10, 20)]
    assert some == sorted(some, reverse=True) and len(set(some)) == 4
    full = max(peaks("llama-3-70b", f"{layout},recompute=full", workload, "megatron-core"))
    assert some[-1] == pytest.approx(full, rel=1e-9), "all blocks of a rank"
    modules = [max(peaks("llama-3-70b", layout, workload, "megatron-core", modules=each))
               for each in ((), ("layernorm",), ("layernorm", "mlp"))]  # fmt: skip
    assert modules == sorted(modules, reverse=True) and len(set(modules)) == 3
    assert max(peaks("llama-3-70b", layout, workload, "megatron-core", precision="fp8")) < modules[0]


@from_table
def test_a_setting_that_an_engine_has_not_is_rejected(engine, settings, words):
    with pytest.raises(UserError, match="^[^\n]*" + words.replace("(", "\\(")):
        peaks("llama-3-8b", "dp=8,zero=1", Workload(2048, 8), engine, **settings)
