"""What the views' functions return, against the rooms that they stand on."""

import json
import math
import sys
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, pipeline
from shardwise.layout.serving import plan_of
from shardwise.model.catalog import catalog, get
from shardwise.model.parameters import count
from shardwise.planner import plan as search
from shardwise.planner.strategies import Asked, compare
from shardwise.predict import estimate, zero_table
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import engine
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.step import training_step
from shardwise.predict.time.strategy_training import passes
from shardwise.report.units import format_bytes, format_time
from shardwise.schedule import Algorithm, algorithms, build
from shardwise.schedule.choose import pricer
from shardwise.schedule.pipeline import build as build_pipeline
from shardwise.schedule.pipeline import generators
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.studio.columns import PACKED, encode
from shardwise.studio.data import collectives, memory, pipelines, plan, tokens, tokens_layer
from shardwise.studio.data.registry import TRAVELS, VIEWS, answer, parts
from shardwise.studio.page import parse_view
from shardwise.studio.query import Query


@pytest.mark.parametrize("found", algorithms(), ids=lambda found: f"{found.collective}-{found.name}")
def test_every_wanted_chunk_ends_complete(found: Algorithm) -> None:
    for ranks in (1, 3, 8):
        view = collectives.data({"collective": found.collective, "algorithm": found.name, "ranks": str(ranks)})
        more, options = view.more, {name: view.state[name] for name in found.options}
        schedule = build(found.collective, found.name, ranks, **options)
        assert len(more["masks"]) == len(more["sentences"]) == len(list(schedule.rounds())) + 1
        everyone, sums = (1 << ranks) - 1, found.collective in ("all-reduce", "reduce-scatter", "reduce")
        for i in more["wanted"]:
            mask = more["masks"][-1][i]
            assert mask == everyone if sums else mask.bit_count() == 1
        assert set(view.tables["rounds"].columns["op"]) <= {"add", "copy"}


def test_costs_are_the_pricers() -> None:
    view = collectives.costs({"collective": "all-reduce", "ranks": "8", "bytes": "65536", "cluster": "8xH100"})
    prices = pricer("all-reduce", 8, Cluster.parse("8xH100"))
    ranked = prices.ranked(65536)
    costs, sizes = view.tables["costs"].columns, view.tables["sizes"].columns
    assert costs["algorithm"] == [choice.name for choice in ranked]
    assert costs["time"] == [choice.price.seconds for choice in ranked]
    at = list(sizes["bytes"]).index(65536)
    for choice in ranked:
        assert sizes[choice.name][at] == choice.price.seconds
        assert sizes["lower bound"][at] <= choice.price.seconds


@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 300), (7, 3_000_000), (5, 1 << 36)])
def test_curves_reach_the_present_point(ranks: int, nbytes: int) -> None:
    view = collectives.costs({"collective": "all-gather", "ranks": str(ranks), "bytes": str(nbytes)})
    costs = dict(zip(*(view.tables["costs"].columns[name] for name in ("algorithm", "time")), strict=True))
    for name, axis, at in (("sizes", "bytes", nbytes), ("scaling", "ranks", ranks)):
        columns = view.tables[name].columns
        assert list(columns[axis]) == sorted(columns[axis])
        here = list(columns[axis]).index(at)
        assert {algorithm: columns[algorithm][here] for algorithm in costs} == costs
    micros = pipelines.curve({"ranks": "4", "micro": "300"}).tables["curve"].columns["micro-batches"]
    assert 300 in micros and tokens.data({}).tables["flip"].columns["tokens of a pass"][-1] == 65536


def test_transfers_between_nodes_take_the_slow_link() -> None:
    view = collectives.data({"ranks": "16", "cluster": "2x8xH100"})
    columns = view.tables["rounds"].columns
    for src, dst, link in zip(columns["from"], columns["to"], columns["link"], strict=True):
        assert (link == "between nodes") == (src // 8 != dst // 8)
    with pytest.raises(UserError, match="16 ranks do not fit 8xH100"):
        collectives.data({"ranks": "16", "cluster": "8xH100"})


@settings(max_examples=25)
@given(name=st.sampled_from([g.name for g in generators()]), p=st.integers(2, 6), groups=st.integers(1, 3))
def test_events_are_the_simulations(name: str, p: int, groups: int) -> None:
    m = 2 * p * groups
    view = pipelines.data({"a": name, "b": "none", "ranks": str(p), "micro": str(m), "F": "7", "I": "9", "W": "5"})
    drawn = view.more["a"]
    schedule = build_pipeline(name, p, m, drawn["virtual"])
    simulated = simulate(schedule, Times.shared(schedule, 0.007, 0.009, 0.005))
    assert drawn["makespan"] == simulated.makespan and drawn["bubble"] == simulated.bubble
    events = drawn["events"]
    busy = [float(events["seconds"][events["rank"] == rank].sum()) for rank in range(p)]
    assert busy == pytest.approx(simulated.busy)
    assert float((events["start"] + events["seconds"]).max()) <= simulated.makespan * (1 + 1e-12)
    assert drawn["peak"] == pytest.approx(max(max(held["held"]) for held in drawn["held"]))


@settings(max_examples=25)
@given(
    zero=st.integers(0, 3), tp=st.sampled_from([1, 2]), micro=st.sampled_from([1, 2]), each=st.integers(1, 3),
    recompute=st.sampled_from(["none", "selective", "full"]), sp=st.booleans(),
)  # fmt: skip
def test_the_highest_moment_is_the_predicted_peak(
    zero: int, tp: int, micro: int, each: int, recompute: str, sp: bool
) -> None:
    dp = 4 // tp
    given = {"model": "tiny-llama", "cluster": "4xH100", "tp": tp, "zero": zero, "micro": micro, "recompute": recompute}
    given |= {"seq": 64, "batch": dp * micro * each, "sp": int(sp and tp > 1)}
    view = memory.data({name: str(value) for name, value in given.items()})
    layout = Layout(dp=dp, tp=tp, zero=zero, micro=micro, recompute=recompute, sp=sp and tp > 1)
    report = estimate(get("tiny-llama"), layout, Workload(seq=64, batch=dp * micro * each), Cluster.parse("4xH100"))
    assert view.more["layout"] == str(layout)
    assert view.tables["devices"].columns["peak"] == [role.peak_bytes for role in report.roles]
    assert max(view.tables["moments"].columns["together"]) == report.roles[0].peak_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved"])
def test_a_pipelines_highest_moment_is_the_predicted_peak(schedule: str) -> None:
    given = {"model": "tiny-llama", "cluster": "4xH100", "pp": "2", "zero": "1", "seq": "64", "batch": "16"}
    given |= {"schedule": schedule, "virtual": "1" if schedule == "1f1b" else "2"}
    layout = Layout(dp=2, pp=2, zero=1, schedule=schedule, virtual=int(given["virtual"]))
    report = estimate(get("tiny-llama"), layout, Workload(seq=64, batch=16), Cluster.parse("4xH100"))
    for place in range(2):
        moments = memory.data(given | {"place": str(place)}).tables["moments"].columns
        peak = next(role.peak_bytes for role in report.roles if 2 * place in role.ranks)
        assert max(moments["together"]) == peak
        spans = sorted((a, b) for a, b in zip(moments["from"], moments["to"], strict=True) if a < b)
        assert len(spans) > 16 and spans[0][0] == 0
        assert all(end == pytest.approx(start) for (_, end), (start, _) in pairwise(spans)), "it works or waits"


def test_every_moment_has_its_phase() -> None:
    given = {"model": "tiny-llama", "cluster": "2xH100", "seq": "64", "batch": "4"}
    columns = memory.data(given).tables["moments"].columns
    phases = [name for name, _ in groupby(columns["phase"])]
    assert phases == ["forward", "loss", "backward"] * 2 + ["optimizer"]
    assert all(moment.split(": ")[-1].split()[0] == "forward" for moment, phase in
               zip(columns["moment"], columns["phase"], strict=True) if phase == "forward")  # fmt: skip
    staged = memory.data(given | {"pp": "2"}).tables["moments"].columns
    assert set(staged["phase"]) == {"forward", "backward", "waits", "optimizer"}


def test_ranks_that_compute_are_counted_at_every_moment() -> None:
    more = pipelines.data({"ranks": "3", "micro": "4", "F": "7", "b": "none"}).more
    whole, events = more["a"]["makespan"], more["a"]["events"]
    for frame, said in enumerate(more["moments"][:-1]):
        time = frame / 60 * whole
        busy = sum(
            begin <= time + 1e-9 < begin + takes
            for begin, takes in zip(events["start"], events["seconds"], strict=True)
        )
        assert said.endswith(f": {busy} of 3 ranks of 1f1b compute.")
    assert len(more["moments"]) == 61 and more["moments"][-1].endswith("1f1b is done.")


def test_a_bubble_is_left_out_where_a_schedule_cannot_be() -> None:
    columns = pipelines.curve({"a": "dualpipe-v", "b": "none", "ranks": "4", "micro": "10"}).tables["curve"].columns
    micros, bubbles = columns["micro-batches"], columns["A, dualpipe-v"]
    assert len(columns) == 2 and 10 in micros and bubbles[0] is None
    for micro, bubble in zip(micros, bubbles, strict=True):
        if bubble is not None:
            alone = {"a": "dualpipe-v", "b": "none", "ranks": "4", "micro": str(micro)}
            assert [bubble] == pipelines.data(alone).tables["compared"].columns["bubble of the total"]


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("gpipe", 1)])
def test_the_moments_of_a_huge_batch_are_those_of_its_steady_state(
    schedule: str, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def training(layout: Layout, tied: bool, count: int, early: bool) -> object:
        made.append(count)
        return build(layout, tied, count, early)

    build = pipeline.training
    monkeypatch.setattr(pipeline, "training", training)
    given = {"model": "llama-3-8b", "cluster": "4xH100", "pp": "4", "batch": str(1 << 20), "place": "1"}
    view = memory.data(given | {"schedule": schedule, "virtual": str(virtual)})
    moments = view.tables["moments"].columns
    assert max(made) < 100
    assert moments["moment"][-1] == "optimizer" and moments["to"][-1] > 0, "a whole step, with times"
    if schedule != "gpipe":
        assert max(moments["together"]) == view.tables["devices"].columns["peak"][1]
    assert "repeat its steady state" in " ".join(view.how["moments"].steps)


def test_what_would_fit_is_estimate_again() -> None:
    view = memory.data({"model": "llama-3-8b", "cluster": "8xH100"})
    fits = view.tables["fits"].columns
    for zero, recompute, peak, ok in zip(fits["zero"], fits["recompute"], fits["peak"], fits["fits"], strict=True):
        layout = Layout(dp=8, zero=zero, recompute=recompute)
        report = estimate(get("llama-3-8b"), layout, Workload(seq=8192, batch=32), Cluster.parse("8xH100"))
        assert peak == report.roles[0].peak_bytes and ok == (peak <= view.more["capacity"])


def test_the_plan_is_the_searchs() -> None:
    view = plan.data({"model": "llama-3-8b", "cluster": "8xH100", "seq": "4096", "batch": "64"})
    found = search(get("llama-3-8b"), Cluster.parse("8xH100"), Workload(seq=4096, batch=64), top=12).to_json()
    ranked = view.tables["ranked"].columns
    for name, key in (("layout", "layout"), ("step", "seconds"), ("80% from", "low"), ("MFU", "mfu")):
        assert ranked[name] == [row[key] for row in found["ranked"]]
    parts = view.tables["parts"].columns
    for i, seconds in enumerate(ranked["step"]):
        assert sum(parts[name][i] for name in parts if name != "layout") == pytest.approx(seconds)
    assert len(view.tables["alternatives"].columns["instead"]) == len(found["alternatives"])
    assert view.more["not_runnable"] == found["ranked"][0]["not_runnable"]
    long = plan.data({"model": "llama-3-8b", "cluster": "2x8xH100", "seq": "65536", "batch": "4"})
    assert "cp=" in long.more["best"] and not long.more["not_runnable"] and not long.more["none_runs"]
    mixed = plan.data({"model": "mixtral-8x7b", "cluster": "2x8xH100", "seq": "4096", "batch": "64"})
    assert "ep=" in mixed.more["best"] and not mixed.more["not_runnable"] and not mixed.more["none_runs"]
    other = plan.data({"model": "bloom-176b", "cluster": "8x8xH100", "seq": "2048", "batch": "64"})
    assert other.more["none_runs"] == "None of these run here yet: ALiBi positions."


def test_every_scored_run_is_a_dot() -> None:
    view = plan.scoreboard({})
    runs, sources = view.tables["scoreboard"].columns, view.tables["sources"].columns
    assert len(runs["run"]) == sum(sources["runs"]) > 10
    for measured, predicted, error in zip(runs["measured"], runs["predicted"], runs["error"], strict=True):
        assert error == predicted / measured - 1


def test_so_far_is_the_sum_of_the_tokens() -> None:
    columns = tokens.spent({"output": "200"}).tables["spent"].columns
    assert columns["token"][199] == 200
    for side in "AB":
        for each, so_far in (("takes", "time so far"), ("sends", "sent so far")):
            assert columns[f"{side} {so_far}"][199] == pytest.approx(
                math.fsum(columns[f"{side} {each}"][:200]), rel=1e-12
            )
    middle = tokens.data({"output": "200"}).tables["compared"].columns
    assert columns["A takes"][0] == middle["first token"][0] and columns["A takes"][199] == middle["last token"][0]


def test_on_cpus_the_page_asks_the_same_software_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Cluster.parse("2xH100")
    cpus = replace(gpus, device=replace(gpus.device, kind="cpu"))
    monkeypatch.setattr(Cluster, "parse", lambda text: cpus)
    state = {"model": "tiny-llama", "cluster": "calibrated.toml", "prompt": "64", "output": "4"}
    spent, middle = tokens.spent(state).tables["spent"].columns, tokens.data(state).tables["compared"].columns
    assert spent["A takes"][0] == middle["first token"][0]
    asked = {"model": "tiny-llama", "cluster": "calibrated.toml", "seq": "512", "batch": "8"}
    assert any("shardwise-cpu" in line for line in plan.data(asked).how["ranked"].steps)


@from_table
def test_links_to_other_views_show_the_same_layout(view: str, state: dict[str, str]) -> None:
    found = answer(view, {"model": "llama-3-8b"} | state)
    listed = found.more["opens"] if view != "tokens" else [link for one in found.more["opens"] for link in one]
    titles = [title for title, _ in listed]
    assert titles == {"memory": ["Pipelines", "Plan"], "plan": ["Memory"],
                      "tokens": ["Memory", "Pipelines", "Plan", "Memory", "Plan"]}[view]  # fmt: skip
    for title, address in listed:
        name, words = parse_view(address)
        opened = answer(name, words)
        assert opened.state.get("layers", found.state["layers"]) == found.state["layers"]
        if (view, title) == ("plan", "Memory"):
            assert opened.more["layout"] == found.more["best"] and opened.state["seq"] == 4096
        if (view, title) == ("memory", "Plan"):
            assert all(word in opened.more["best"].split(",") for word in ("tp=4", "pp=4", "dp=8", "zero=1"))
        if (view, title) == ("memory", "Pipelines"):
            assert (opened.state["a"], opened.state["ranks"], opened.state["virtual"]) == ("interleaved", 4, 2)


STRATEGIES = ["tp=4", "dp=4,zero=3", "tp=2,dp=2,zero=3", "pp=2,tp=2", "pp=4"]


def test_a_slower_link_takes_longer_and_sends_as_much() -> None:
    state = {"model": "llama-3-8b", "cluster": "4xH100", "output": "8"}
    usual, slow = tokens.spent(state), tokens.spent(state | {"link": "50"})
    assert usual.state["link"] == 450 and slow.state["link"] == 50
    before, after = usual.tables["spent"].columns, slow.tables["spent"].columns
    for side in "AB":
        assert after[f"{side} sends"] == before[f"{side} sends"]
        assert after[f"{side} takes"][0] > before[f"{side} takes"][0]


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("batch", ["1", "32"])
def test_the_way_through_the_layers_takes_what_a_token_takes(text: str, batch: str) -> None:
    given = {"model": "tiny-llama", "cluster": "4xH100", "a": text, "b": text, "prompt": "16", "output": "4"}
    view = tokens.data(given | {"batch": batch})
    token, layers = view.tables["compared"].columns["token half-way"][0], get("tiny-llama").layers
    drawn = view.more["through"]["columns"]
    ends = drawn["start"] + drawn["seconds"]
    assert max(ends) == pytest.approx(token, rel=1e-12)
    columns = view.tables["through"].columns
    done = columns["A is done after"]
    assert columns["layer"] == list(range(1, layers + 1)) and done == sorted(done) and done[-1] < token
    kinds = [view.more["through"]["kinds"][kind] for kind in drawn["kind"]]
    moved = sum(seconds for seconds, kind in zip(drawn["seconds"], kinds, strict=True) if kind == "a-moving")
    assert moved > 0 and sum(columns["A moves"]) <= moved * (1 + 1e-12)
    steps = view.tables["layer"].columns
    told, middle = steps["takes"][: tokens_layer.STEPS], layers // 2
    for step in (2, 4):
        assert 0 < told[step] < columns["A computes"][middle]
    # The counters of one layer add up to the time between two layers, and with the rest to the token's.
    between = done[middle] - done[middle - 1]
    if "pp" in text:  # and in a pipeline to that without messages
        between = columns["A computes"][middle] + columns["A moves"][middle]
    assert sum(told) == pytest.approx(between)
    assert steps["so far"][tokens_layer.STEPS - 1] * layers == pytest.approx(steps["takes"][-2])
    assert steps["takes"][-2] + steps["takes"][-1] == pytest.approx(token) == steps["so far"][-1]


def test_one_layer_on_one_clock_is_the_ways() -> None:
    view = tokens.data({})
    clock, through = view.more["clock"], view.tables["through"].columns
    slow, middle = through["B is done after"], 40
    assert clock["span"] == pytest.approx(slow[middle] - slow[middle - 1]) == clock["done"][1][0]
    # While ZeRO-3 gathers one layer, tensor parallelism is done with thirty.
    gathered = next(
        seconds for row, seconds in zip(clock["columns"]["rank"], clock["columns"]["seconds"], strict=True) if row == 3
    )
    assert sum(end <= clock["span"] for end in clock["done"][0]) == 33 and len(clock["done"][1]) == 1
    assert sum(end <= gathered for end in clock["done"][0]) == 27 and gathered < clock["span"]
    ends = clock["columns"]["start"] + clock["columns"]["seconds"]
    assert max(ends) <= clock["span"] * (1 + 1e-12) and min(clock["columns"]["start"]) == 0
    assert clock["sentences"][-1].endswith("A, tp=8, has done 33 layers; B, dp=8,zero=3, has done 1 layer.")


@pytest.mark.parametrize("text", STRATEGIES)
def test_what_ranks_hold_covers_the_layer_once(text: str) -> None:
    view = tokens.data(
        {"model": "tiny-llama", "cluster": "4xH100", "a": text, "b": text, "prompt": "16", "output": "4"}
    )
    (side,) = view.more["sides"]
    assert side["layout"] == str(Layout.parse(text))
    for matrix in view.more["matrices"]:
        rows, columns = matrix["rows"], matrix["columns"]
        grid = np.zeros((rows, columns), dtype=int)
        for piece in side["pieces"]:
            for left, top, wide, high in piece["boxes"] if piece["name"] == matrix["name"] else ():
                edges = np.array([top * rows, (top + high) * rows, left * columns, (left + wide) * columns])
                a, b, c, d = edges.round().astype(int)
                assert np.abs(edges - [a, b, c, d]).max() < 1e-6
                grid[a:b, c:d] += 1
                assert piece["elements"] >= (b - a) * (d - c)
        assert (grid == 1).all(), matrix


@pytest.mark.parametrize(
    ("text", "of_all"), [("tp=8", 1 / 8), ("tp=4,pp=2", 1 / 8), ("tp=8,pp=2", 1 / 16), ("dp=8,zero=3", 1 / 8)]
)
def test_every_rank_is_drawn_with_its_share(text: str, of_all: float) -> None:
    view = tokens.data({"cluster": "2x8xH100", "a": text, "b": text, "output": "1"})
    (side,), sizes = view.more["sides"], {m["name"]: m["rows"] * m["columns"] for m in view.more["matrices"]}
    layout = Layout.parse(text)
    assert len(side["devices"]) == layout.ranks
    areas: dict[int, dict[str, float]] = {device["rank"]: {} for device in side["devices"]}
    for piece in side["pieces"]:
        if piece["boxes"]:
            areas[piece["rank"]][piece["name"]] = sum(wide * high for _, _, wide, high in piece["boxes"])
    for device in side["devices"]:
        first, after = device["layers"]
        assert (after - first) / 80 * device["share"] == pytest.approx(of_all, rel=0.01)
        assert device["of_all"] == pytest.approx(of_all, rel=0.01)
        area = sum(share * sizes[name] for name, share in areas[device["rank"]].items()) / sum(sizes.values())
        assert area == pytest.approx(device["share"] if device["stage"] == 0 else 0.0, rel=0.01)
        if layout.tp > 1 and device["stage"] == 0:
            assert areas[device["rank"]] == pytest.approx(dict.fromkeys(sizes, 1 / layout.tp))
    if layout.stage == 3:
        assert all(len(parts) < len(sizes) for parts in areas.values()), "blocks of some matrices, no slice of each"


@pytest.mark.parametrize("text", STRATEGIES)
def test_what_a_layer_moves_is_said_as_it_is_drawn(text: str) -> None:
    view = tokens.data({"model": "llama-3-8b", "cluster": "4xH100", "a": text, "b": "dp=4", "output": "8"})
    layer, layout, through = view.tables["layer"].columns, Layout.parse(text), view.more["through"]
    said = view.more["chapters"][3]["sentences"][1]
    took = {}
    for what in ("gather", "sum", "message"):
        number = next((i for i, name in enumerate(through["names"]) if name.endswith(what)), None)
        columns = through["columns"]
        took[what] = 0.0 if number is None else columns["seconds"][list(columns["name"]).index(number)]
    assert ("while its weights come" in said) == (layout.stage == 3)
    assert ("partial results" in said) == (layout.tp > 1)
    if layout.tp > 1:
        assert f"{format_time(took['sum'])} on adding up" in said
    if layout.pp > 1:
        assert f"in {format_time(took['message'])}, and waits." in layer["in words"][5]
    if layout.stage == 3:
        assert f"{format_time(layer['takes'][layer['what'].index('gather')])} while" in said
    assert view.more["chapters"][3]["sentences"][2].endswith(" and moves nothing.")


def _seconds_of(drawn: dict[str, Any], name: str) -> float:
    """Seconds of the first event of that name."""
    number = drawn["names"].index(name)
    return float(drawn["columns"]["seconds"][list(drawn["columns"]["name"]).index(number)])


@pytest.mark.parametrize("text", STRATEGIES)
def test_memory_rises_with_a_gather_and_falls_again(text: str) -> None:
    view = tokens.data({"model": "llama-3-8b", "cluster": "4xH100", "a": text, "b": "tp=4", "output": "8"})
    layout, columns = Layout.parse(text), view.tables["layer"].columns
    unit = plan_of(get("llama-3-8b"), layout).by_name["blocks.0"]
    memory, ahead, took = (columns[name][:6] for name in ("weights there", "of the next layer", "takes"))
    if layout.stage != 3:
        assert set(memory) == {2 * unit.numel} and set(ahead) == {0.0}
        return
    part, whole = 2 * unit.shard_numel, 2 * unit.numel
    gather = _seconds_of(view.more["through"], "layer 17: gather")
    assert memory[0] == part and memory[1] == part + whole
    # While this layer computes, the next one comes; nothing of it is there when nothing was computed yet.
    assert ahead == sorted(ahead) and ahead[1] == 0 and ahead[4] == pytest.approx(sum(took[2:5]) / gather)
    assert memory[4] == pytest.approx(part + whole + ahead[4] * whole)
    assert memory[5] == pytest.approx(part + ahead[5] * whole)


def test_a_product_cut_by_column_and_row_is_the_product() -> None:
    drawn = tokens.data({"model": "llama-3-8b", "output": "8"}).more["product"]
    x, first, second = (np.array(drawn[name]) for name in ("x", "first", "second"))
    assert drawn["h"] == np.maximum(x @ first, 0).tolist() != (x @ first).tolist()
    assert drawn["y"] == (np.maximum(x @ first, 0) @ second).tolist() == np.sum(drawn["partials"], axis=0).tolist()
    assert [*drawn["columns"][0], *drawn["columns"][1]] == list(range(4)) and len(drawn["partials"]) == 2
    assert "W1 has 4,096 rows and 14,336 columns, of which tp=8 gives each rank 1,792" in drawn["sentences"][-1]


def test_passes_of_training_take_what_the_time_model_says() -> None:
    model, cluster = get("llama-3-8b"), Cluster.parse("8xH100")
    layouts = [Layout.parse(text) for text in ("tp=8", "dp=8,zero=3", "tp=2,dp=4,zero=3")]
    for one in compare(model, layouts, cluster, Asked(64, 8)).strategies:
        forward, backward = passes(one.trained.block, model.layers)
        both = sum(max(piece.end for piece in pieces) for pieces in (forward, backward)) * one.trained.micro_batches
        split = StepShape.of(replace(one.layout, micro=1), Workload(seq=8192, batch=one.layout.ranks))
        trainer, pricing = engine(one.trained.engine), Pricing(cluster)
        blocks = [training_step(replace(model, layers=n), split, trainer, pricing).parts for n in (32, 64)]
        # Twice the layers take the seconds of the first half once more: those of the blocks alone.
        outside = ("optimizer", "gradients", "host")
        more, less = (sum(v for name, v in parts.items() if name not in outside) for parts in blocks[::-1])
        assert both == pytest.approx(float(more - less), rel=0.02), one.layout
        gathers = [piece for piece in (*forward, *backward) if piece.what == "gather"]
        assert len(gathers) == (2 * model.layers - 1) * (one.layout.stage == 3)
        for piece in gathers[1:]:
            assert any(
                other.start == piece.start and other.what in ("forward", "backward") for other in forward + backward
            )


def test_the_training_chapter_fits_and_is_estimate() -> None:
    view = tokens.data({})
    columns, gpus = view.tables["trained"].columns, view.state["gpus"]
    assert gpus == 16 and columns["strategy"][1] == "dp=16,zero=3,recompute=full"
    assert [said.split(":")[0] for said in columns["memory"]] == ["does not fit", "fits"]
    report = estimate("llama-3-70b", columns["strategy"][1], Workload(seq=8192, batch=gpus), "2x8xH100")
    assert columns["step"][1] == report.time and report.room and report.room["state"] == "fits"
    assert format_bytes(max(role.peak_bytes for role in report.roles)) in columns["memory"][1]
    # Fewer devices are not enough; of a small model they are.
    assert tokens.data({"gpus": "8"}).tables["trained"].columns["memory"][1].startswith("does not fit: 1")
    assert tokens.data({"model": "llama-3-8b"}).state["gpus"] == 8
    with pytest.raises(UserError, match="gpus=24: choose one of 8, 16, 32"):
        tokens.data({"gpus": "24"})


TOO_LARGE = [
    {"a": "dp=8"}, {"a": "dp=4,tp=2", "cluster": "8xL40S"}, {"a": "pp=8", "batch": "512", "prompt": "4096"},
    {"a": "tp=2,dp=4", "precision": "fp32"}, {"a": "pp=2,dp=4", "cluster": "8xL40S"}, {"model": "llama-3-405b"},
    {"model": "llama-3-405b", "cluster": "8xA100"}, {"cluster": "2xL40S"}, {"batch": "4096", "prompt": "4096"},
    {"model": "llama-3-8b", "batch": "4096", "a": "dp=8", "prompt": "4096"},
]  # fmt: skip
"""Ten states of which a strategy does not fit."""


@pytest.mark.parametrize("state", TOO_LARGE, ids=lambda state: ",".join(state.values()))
def test_fit_is_shown_for_states_that_do_not_fit(state: dict[str, str]) -> None:
    view = tokens.data(state)
    fits, sides = view.tables["compared"].columns["fits"], view.more["sides"]
    assert False in fits
    rows = {row["name"]: row["values"] for row in view.more["metrics"]}
    for i, (fit, side) in enumerate(zip(fits, sides, strict=True)):
        verdict = "fits" if fit else "does not fit"
        for said in (side["fits"], rows["Memory for the answer"][i], view.tables["race"].columns["memory"][i]):
            assert said.startswith(f"{verdict}: ")
        assert {device["can"] == "does not fit" for device in side["devices"]} == {not fit}
        held = view.more["chapters"][1]["sentences"][1 + i]
        assert ("does not fit" in held) == (not fit) == (f"{side['layout']} does not fit" in view.more["headline"])
        trains = view.tables["trained"].columns["memory"][i]
        assert side["trains"] == trains == rows["Memory for the training step"][i]
        assert trains in " ".join(view.more["chapters"][6]["sentences"])


def test_one_price_of_a_collective_in_all_views() -> None:
    view = tokens.data({})
    through = view.more["through"]
    for link, what in ((side["link"], name) for side, name in zip(view.more["sides"], ("sum", "gather"), strict=True)):
        _, given = parse_view(link)
        priced = collectives.costs(given).more["priced"]
        seconds = _seconds_of(through, f"layer 41: {what}")
        assert seconds == pytest.approx(priced.get("reading_peers_seconds", priced["library_seconds"]), rel=1e-12)


def test_from_where_on_gathering_is_faster() -> None:
    view = tokens.data({})
    columns, (ratio,) = view.tables["flip"].columns, view.more["ratios"]
    crossing = ratio["faster_from_tokens"]
    for number, a, b in zip(*columns.values(), strict=True):
        assert (b <= a) == (number >= crossing)
    assert columns["tokens of a pass"][0] == 1 and columns["tokens of a pass"][-1] == 65536
    assert all(
        f"From about {crossing:,} tokens on, dp=8,zero=3 is the faster one." in said for said in view.more["flip"]
    )
    assert "2 x 65,536 x 8,192 x 28,672 = 30.8 TFLOP" in view.more["flip"][-1]


def test_what_zero_saves_is_the_zero_table() -> None:
    view = tokens.data({"gpus": "64"})
    columns = view.tables["zero"].columns
    totals = zero_table(count(get("llama-3-70b")), [64])
    assert columns["in all"] == [totals[stage][64] for stage in range(4)]
    assert columns["fits"] == [False, False, False, True] and "= 16 bytes a weight" in view.more["zero"][0]


def test_shares_of_a_token_and_of_training_add_up() -> None:
    view = tokens.data({"model": "llama-3-8b", "cluster": "4xH100", "a": "pp=4", "b": "dp=4,zero=3", "output": "8"})
    columns = view.tables["shares"].columns
    for shares in zip(columns["computes"], columns["moves data"], columns["waits"], strict=True):
        assert sum(shares) == pytest.approx(1)
    values = {row["name"]: row["values"] for row in view.more["metrics"]}
    assert columns["moves data"] == pytest.approx(
        [*values["of it communication"], *values["of it moving data, not hidden"]]
    )


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "runs"])
def test_every_figure_says_how_it_was_computed(view: str) -> None:
    for part in parts(view):
        found = answer(part, {})
        assert set(found.tables) == set(found.how)
        for how in found.how.values():
            assert how.steps and all(step and "\n" not in step for step in how.steps)
        json.loads(encode(found))


def test_long_arrays_are_packed_and_short_ones_are_not() -> None:
    long, short = np.arange(PACKED, dtype="f8"), np.arange(3, dtype="f4")
    found = json.loads(encode({"long": long, "short": short, "nan": float("nan")}))
    assert found["short"] == [0, 1, 2] and found["nan"] == "NaN"
    assert found["long"]["packed"] == "f8"


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
def test_any_words_give_a_state_or_one_line(words: dict[str, str]) -> None:
    query = Query(words)
    try:
        query.whole("a", 1, 0, 9)
        query.number("b", 1.0, 0, 9)
        query.flag("c")
        query.word("d", "x", ["x", "y"])
        query.done()
    except UserError as error:
        assert "\n" not in " ".join(str(error).split("\n")[:1])
    else:
        assert set(words) <= set(query.state)


def test_modules_need_no_build_and_nothing_from_outside() -> None:
    from shardwise.studio.page import STATIC, files

    assert {"app.js", "style.css", "theme.css"} <= set(files())
    for path in Path(STATIC).rglob("*.js"):
        text = path.read_text()
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), path
        assert text.startswith("// "), f"{path} says what it holds"


NOT_RUNNABLE = {name for name, model in catalog().items() if model.why_not_runnable()}
MIXED = {name for name, model in catalog().items() if model.experts}
SHORT = {name for name, model in catalog().items() if model.max_positions < 1040}


@from_table
def test_a_model_that_would_be_rejected_is_not_offered(view: str, state: dict[str, str], others: set[str]) -> None:
    assert "bloom-176b" in NOT_RUNNABLE and "tiny-llama" in SHORT
    found = answer(view, state)
    assert set(found.more["left_out"]) == others
    assert set(found.choices["model"]) == set(catalog()) - others
    for name, reason in found.more["left_out"].items():
        assert reason
        with pytest.raises(UserError):
            answer(view, state | {"model": name})


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt", "gpt2"])
def test_a_state_that_names_a_model_alone_suits_it(name: str) -> None:
    given = {"model": name, "cluster": "4xH100"}
    generated = answer("tokens", given)
    assert generated.state["prompt"] + generated.state["output"] <= get(name).max_positions
    for parameter in ("prompt", "output"):
        for value in generated.choices[parameter]:
            assert answer("tokens", given | {parameter: str(value)}).state[parameter] == value
    assert answer("memory", given | {"cluster": "3x8xH100"}).state["batch"] == 48
    assert set(answer("memory", given).choices["seq"]) >= {get(name).max_positions}


def test_what_travels_is_a_parameter_of_the_view() -> None:
    for view, names in TRAVELS.items():
        assert set(names) <= set(answer(view, {}).state)


def test_views_need_numpy_alone() -> None:
    """Answers can be computed where there is no torch, rich, safetensors or resource, such as in a browser."""
    program = """
import sys
for name in ("torch", "rich", "safetensors", "resource"):
    sys.modules[name] = None
from shardwise.studio.columns import encode
from shardwise.studio.data.registry import answer
for view in ("tokens", "tokens/spent", "experts", "collectives", "collectives/costs", "pipelines", "memory", "sync"):
    print(view, len(encode(answer(view, {}))))
"""
    found = run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == 8
