"""All-to-alls and messages along any axes, in real processes, over gloo and through shared memory."""

import json
import os
import random
from collections import Counter
from functools import partial, reduce
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import forked
from harness.cases import from_table, table
from harness.checks import assert_ledger, assert_replicas_equal, assert_rules, train
from harness.comms_jobs import Exchanges
from harness.jobs import RankOutcome
from harness.pool import Pool, RankFailed, run_ranks
from harness.reference import Case
from harness.shared_jobs import Said, pieces, quick_alone
from harness.space import EXPERT_MODELS, MODELS
from harness.today import EVERYTHING, by_turns, seed, some_of
from shardwise.api import _carried_by
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import CP, DP, EDP, EP, SHARD, TP
from shardwise.layout.transport_buffers import STAGED
from shardwise.predict import estimate
from shardwise.predict.memory.homes import host_bytes
from shardwise.predict.memory.step import predict_bytes
from shardwise.predict.traffic.schedules import predict_transport
from shardwise.report import StepReport, compare
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_report import merge_roles
from shardwise.runtime.job.setup import cuda_device, sharing
from shardwise.runtime.transport.buffers import Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.mail import PAGE, _room
from shardwise.runtime.transport.protocol import Realization
from shardwise.runtime.transport.shared_collective import PIECE, SLOTS

transports = pytest.mark.parametrize("shared", [False, True], ids=["gloo", "shared"])


@transports
@pytest.mark.parametrize(
    ("layout", "axes"),
    [("dp=2,tp=2,ep=4", (EP, TP, DP)), ("cp=3,ep=3", (CP, EP)), ("dp=4,zero=1,shard=2,ep=2", (SHARD, EDP, DP))],
)
def test_exchanges_along_axes(layout, axes, shared):
    rounds = 6
    mesh = Mesh(Layout.parse(layout))
    job = Exchanges(layout, axes, shared, seed(), rounds)
    for ledger, given_away in run_ranks("harness.comms_jobs:exchange", mesh.layout.ranks, job):
        assert sum(row.elements * row.count for row in ledger if row.unit == "exchange") == given_away
        for name in map(mesh.name, axes):
            counts = Counter({(row.op, row.unit): 0 for row in ledger})
            for row in ledger:
                counts[row.op, row.unit] += row.count * (row.axes == name)
            assert counts == {
                ("all_to_all", "exchange"): rounds,
                ("all_to_all", "between"): rounds,
                ("send", "ring"): 2 * rounds,
                ("recv", "ring"): 2 * rounds,
            }


@transports
def test_rows_that_do_not_fit(shared):
    job = Exchanges("dp=2", (DP, TP), shared, 0, 0)
    for said in run_ranks("harness.comms_jobs:objections", 2, job):
        assert said == [
            "8 rows are not [8] rows for 2 ranks",
            "8 rows are not [9, -1] rows for 2 ranks",
            "7 rows are not [3, 3] rows for 2 ranks",
            "torch.float32 [4, 4] of [8] are not torch.float64 [8]",
        ]


class Noted:
    def __init__(self, calls, lazy):
        self.calls, self.lazy = calls, lazy

    def how(self, op, full):
        return Realization("noted", self.lazy)

    def shortcut(self, op, nbytes):
        return False

    def wait(self):
        self.calls.append("wait")

    def is_completed(self):
        return True

    def __getattr__(self, name):
        def started(*args, **options):
            self.calls.append(name)
            return self

        return started


class NotedPulse:
    def __init__(self, calls):
        self.calls, self.words = calls, []

    def collective(self, words):
        self.words.append(words)

    def wait(self, words=None):
        self.calls.append(words)

    def work(self):
        self.calls.append("work")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
@from_table
def test_ledger_timing_and_heartbeat_wrap_every_operation(op, method, lazy, later, monkeypatch):
    monkeypatch.setattr(Comms, "_group", lambda self, ranks: None)
    calls, x = [], torch.zeros(4)
    pulse = NotedPulse(calls)
    comms = Comms(
        Mesh(Layout.parse("dp=2")), 0, (DP,), timeout=1.0, pulse=pulse, backend="gloo",
        connect=lambda group, ranks: Noted(calls, lazy),
    )  # fmt: skip
    arguments = {
        "all_gather": (x, x[:2], DP, "unit"),
        "reduce_scatter": (x, DP, "unit", lambda: Target(x[:2])),
        "all_to_all": (x, x.clone(), DP, "unit"),
        "send": (x, DP, 1, "unit"),
        "receive": (x, DP, 1, "unit"),
    }.get(method, (x, DP, "unit"))
    comms.start_recording()
    pending = getattr(comms, method)(*arguments, **({} if op in ("send", "recv") else {"later": later}))
    words = f"{op} over dp for unit in forward"
    assert pulse.words == [words]
    if op in ("send", "recv") or later:
        assert calls == [method], "it has not been waited for"
        pending.wait()
    pending.wait()
    assert calls == [method, words, "wait", "work"]
    assert [(row.op, row.unit, row.elements, row.count) for row in comms.ledger()] == [(op, "unit", 4, 1)]
    (row,) = comms.transport()
    assert row.algorithm == "noted" and row.time_s >= row.wait_s > 0


@transports
def test_reduce_scatters_that_nothing_is_reserved_for(shared):
    job = Exchanges("dp=2", (DP,), shared, 0, 0)
    assert run_ranks("harness.comms_jobs:unreserved", 2, job) == [[3.0] * 4] * 2


# -- Training by the schedule that a layout names, `algorithm=`


LAYOUTS = table(__file__, "LAYOUTS")


def case_of(layout: Layout) -> Case:
    model = MODELS["llama"]
    return Case(model, Workload(seq=16, batch=2 * layout.dp * layout.pp), layout.precision, layout.attention)


def assert_transport(case: Case, layout: Layout, ranks: list[RankOutcome]) -> int:
    """The rows of every rank are the schedule's; returns how many a schedule carried."""
    carried = 0
    for rank, outcome in enumerate(ranks):
        plan = unit_plan(case.model, layout, case.workload, rank=rank, backend=outcome.backend)
        for row, expected in zip(outcome.role.transport, predict_transport(plan, rank), strict=True):
            assert (row.row, row.bytes_sent, row.steps) == (expected.row, expected.bytes_sent, expected.steps), rank
            assert row.algorithm == expected.algorithm or expected.algorithm == "auto"
            carried += bool(row.bytes_sent)
    return carried


@pytest.mark.layouts(lambda text, transport: Layout.parse(text))
@pytest.mark.parametrize(("text", "transport"), by_turns(LAYOUTS, 4, "layouts with algorithms"))
def test_training(text: str, transport: str) -> None:
    layout = Layout.parse(text)
    case = case_of(layout)
    trained = partial(train, layout=layout, transport=transport)
    ranks = trained(case)
    assert_rules(case, layout, ranks, again=trained)
    assert assert_transport(case, layout, ranks) > 0


def own(*words: str) -> str:
    """Standard output of `shardwise` where a module outside the package defines an algorithm."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"SHARDWISE_ALGORITHMS": "harness.own_algorithm", "OMP_NUM_THREADS": "1"}
    done = forked.shardwise(*words, environment=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_one_decorated_function_is_verified_priced_drawn_and_trained_with(tmp_path: Path, transport: str) -> None:
    if transport == "gloo":
        assert "chain" in own("collective", "verify", "all-reduce", "chain", "--ranks", "1-9")
        assert "chain" in own(
            "collective", "cost", "all-reduce", "--cluster", "2x8xH100", "--ranks", "16", "--bytes", "1MB"
        )
        assert "up" in own("collective", "show", "all-reduce", "chain", "--ranks", "3")
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(4000))))

    def train_with(layout: str, name: str) -> list[float]:
        own(
            *("train", "tiny-llama", "--vocab", "300", "--layout", f"{layout},precision=fp64"),
            *("--data", str(tmp_path / "text.txt"), "--seq", "32", "--batch", "3", "--steps", "3", "--no-tensorboard"),
            *("--set", "layers=2,hidden=64,ffn=96", "--validate-batches", "1", "--out", str(tmp_path / name)),
            *("--report", "--transport", transport),
        )
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        return [event["loss"] for event in events if "loss" in event]

    alone, chained = train_with("dp=1", "alone"), train_with("dp=3,algorithm=chain", "chained")
    assert len(alone) == 3 and chained == pytest.approx(alone, rel=1e-9)
    predicted, measured = (
        StepReport.read(tmp_path / f"chained/reports/{source}.json") for source in ("predicted", "measured")
    )
    carried = [
        [(row.algorithm, row.bytes_sent, row.steps) for row in report.roles[0].transport]
        for report in (predicted, measured)
    ]
    assert carried[0] == carried[1] and {row[0] for row in carried[0]} == {"chain"}


# -- Ranks that share a GPU: their tensors go through the host's memory, which is forced on CPU tensors here


LAYOUTS_STAGED = table(__file__, "LAYOUTS_STAGED")


@pytest.mark.parametrize(("model", "text", "transport"), some_of(LAYOUTS_STAGED, 5, "staged layouts"))
def test_training_staged(model: str, text: str, transport: str) -> None:
    """Losses of the same transport without staging, bit by bit, and the predicted ledger and buffers."""
    layout = Layout.parse(text)
    workload = Workload(seq=16, batch=2 * layout.dp * layout.pp)
    case = Case((MODELS | EXPERT_MODELS)[model], workload, layout.precision, layout.attention)
    plain = train(case, layout, transport=transport, memory=False)
    ranks = train(case, layout, transport=transport, staged=True)
    assert [rank.losses for rank in ranks] == [rank.losses for rank in plain]
    assert [rank.norms for rank in ranks] == [rank.norms for rank in plain]
    assert_replicas_equal(ranks)
    assert_ledger(case, layout, ranks)
    for index, rank in enumerate(ranks):
        plan = unit_plan(case.model, layout, workload, rank=index, backend="staged")
        assert rank.backend == plan.backend
        predicted, held = predict_bytes(plan), rank.role.bytes
        for name in ("parameters", "gradients", "optimizer", "comm"):
            assert getattr(held, name) == getattr(predicted, name), (index, name)
        assert rank.role.host == host_bytes(plan) and rank.role.host.comm > 0, index


@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_the_prediction_of_a_run_is_that_of_its_transport(way: str, tmp_path: Path) -> None:
    case, layout = Case(MODELS["llama"], Workload(seq=16, batch=4), "fp64", "sdpa"), Layout.parse("dp=2,precision=fp64")
    ranks = train(case, layout, transport=way, staged=True)
    roles = merge_roles({index: rank.role for index, rank in enumerate(ranks)})
    assert {row.algorithm for role in roles for row in role.transport} == {way + STAGED}
    report = StepReport("measured", case.model.to_json(), str(layout), case.workload.to_json(), "2xGPU", roles)
    directory = RunDirectory(tmp_path)
    directory.report("measured").parent.mkdir()
    report.write(directory.report("measured"))
    assert _carried_by(directory) == "staged"
    predicted = estimate(case.model, layout, case.workload, backend="staged")
    assert compare(predicted, report).equal_ledger
    assert [role.host for role in predicted.roles] == [role.host for role in roles]


def test_ranks_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    devices = [cuda_device(local) for local in range(3)]
    assert [device.index for device in devices] == [0, 1, 0] and current == devices
    assert sharing(devices[1]).startswith("3 ranks share 2 GPUs") and not sharing(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not sharing(devices[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="needs a GPU"):
        cuda_device(0)


# -- Shared memory when things go wrong: ranks that die, do not come, or cannot have the memory


MEBIBYTE = 1 << 20
LARGE = (SLOTS // 2 + 3) * PIECE // 8
"""Numbers of a rank's piece with which a sum has more parts than may be under way at once."""


def mapped(pid: int) -> str:
    """What a process has mapped; nothing once it has ended, whether its parent knows or not."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_a_rank_killed_inside_collectives_is_named_and_nothing_is_left() -> None:
    """At random moments, 20 with SHARDWISE_ALL=1: the others end with one line, and the next start works."""
    generator = random.Random(seed())
    pool = Pool(3)
    try:
        for number in range(20 if EVERYTHING else 3):
            assert pool.run("harness.shared_jobs:healthy", 3, 20) == [0, 0, 0]
            processes = [process.pid for process, _ in pool.workers]
            with pytest.raises(RankFailed, match="RuntimeError: rank 2 has ended"):
                pool.run("harness.shared_jobs:killed", 3, (number, generator.uniform(0.0, 0.15)), limit=30)
            # Segments have no names: they are gone with the processes that mapped them.
            assert not any(mapped(pid) for pid in processes)
            assert not [path for path in Path("/dev/shm").iterdir() if "shardwise" in path.name]
    finally:
        pool.close()


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    assert run_ranks("harness.shared_jobs:late", 2) == ["rank 1 did not come within 0.5 s", ""]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_small_sums_and_gathers_have_the_same_bits_everywhere(ranks: int) -> None:
    """In the order of the ranks, however far one runs ahead, and with other collectives under way."""
    payload = seed() % 1000, 200
    expected = quick_alone(ranks, payload)
    for found in run_ranks("harness.shared_jobs:quick", ranks, payload):
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("job", ["summed", "summed_later", "summed_last"])
@pytest.mark.parametrize(("ranks", "elements"), [(2, 1000), (3, 1000), (4, 1000), (2, LARGE), (3, LARGE)])
def test_what_is_added_up_has_the_bits_of_the_ranks_order(job: str, ranks: int, elements: int) -> None:
    """On every rank, as on gloo: so a run goes on alike where memory cannot be shared."""
    every = [pieces(rank, ranks, elements).view(ranks, elements) for rank in range(ranks)]
    for rank, found in enumerate(run_ranks(f"harness.shared_jobs:{job}", ranks, elements)):
        assert torch.equal(found, reduce(torch.add, [each[rank] for each in every], torch.ones(elements)))


@pytest.mark.parametrize("order", ["rising", "falling", "any"])
def test_messages_of_every_size_share_a_few_segments(order: str) -> None:
    """As a service's prompts make them: in the worst case one segment of each room, and one more of the largest."""
    sizes = list(range(0, 300_000, 701))
    if order != "rising":
        sizes = sizes[::-1] if order == "falling" else random.Random(seed()).sample(sizes, len(sizes))
    sent, _ = run_ranks("harness.shared_jobs:mailed", 2, sizes)
    largest = max(sizes)
    assert largest <= sent <= {"rising": 9, "falling": 3, "any": 9}[order] * largest


@given(st.integers(0, 1 << 40))
def test_a_segment_is_hardly_larger_than_its_message(nbytes: int) -> None:
    room = _room(nbytes)
    assert nbytes <= room <= max(nbytes * 5 / 4, nbytes + PAGE) and room > 0
    assert _room(room) == room


def test_64_megabytes_are_enough_for_any_tensor() -> None:
    """160 MB pass through segments that may have 64 MB at most."""
    assert run_ranks("harness.shared_jobs:limited", 2, (64 * MEBIBYTE, "shared")) == [Said("shared", "", 2.0)] * 2


def test_without_memory_to_share_gloo_carries_everything() -> None:
    assert run_ranks("harness.shared_jobs:limited", 2, (MEBIBYTE // 2, "auto")) == [Said("gloo", "", 2.0)] * 2


def test_who_asks_for_shared_memory_is_told_why_there_is_none() -> None:
    for said in run_ranks("harness.shared_jobs:limited", 2, (MEBIBYTE // 2, "shared")):
        assert said.problem == (
            "no shared memory: rank 0 got no shared memory: File too large; choose --transport gloo"
        )


def test_transports_that_are_gone_leave_no_open_files() -> None:
    for before, after in run_ranks("harness.shared_jobs:open_files", 2, 5):
        assert after <= before
