"""Which files are read, and one line with exit code 2 for the others."""

import gzip
import json
import os
import pickle
import random
import time

import pytest

from harness.command_line import mistake
from harness.recordings import dumps, entry, graph, kernel, span, trace
from shardwise.audit.files.reading import read_files
from shardwise.audit.files.recording import dtype_of, operation, rank_in_name, user_line
from shardwise.audit.files.result import audit_files
from shardwise.errors import UserError


def test_execution_traces_of_torch(recorded):
    recordings, refused = read_files([recorded / f"et_{rank}.json" for rank in range(3)])
    assert refused == [] and [one.rank for one in recordings] == [0, 1, 2]
    for one in recordings:
        assert [(call.op, call.inputs) for call in one.calls] == [("all_reduce", 4000), ("barrier", 0)] * 3
        assert [call.order for call in one.calls] == [*range(6)]
        assert "times" in one.unknown and "groups" in one.unknown


NODE = {"id": 5, "name": "record_param_comms", "ctrl_deps": 1}
INIT = [{"pg_name": "0", "ranks": [], "group_size": 4}, {"pg_name": "7", "ranks": [1, 3], "group_size": 2}]


def test_execution_traces_that_name_groups(tmp_path):
    about = {"collective_name": "reduce_scatter_tensor_coalesced", "dtype": "BFloat16", "in_msg_nelems": 64}
    about |= {"out_msg_nelems": 32, "pg_name": "7", "pg_size": 2, "global_rank_start": 1, "global_rank_stride": 2}
    attributes = [{"name": name, "type": "", "value": value} for name, value in about.items()]
    nodes = [
        {"id": 3, "name": "## process_group:init ##", "inputs": {"values": [json.dumps(INIT)]}},
        NODE | {"inputs": {"values": [[], 33, ["7", ""], 1, "x", []]}, "outputs": {"values": []}, "attrs": attributes},
        NODE | {"id": 9, "inputs": {"values": [141, 0, 1, "wait", [], []]}, "outputs": {"values": []}},
    ]
    (tmp_path / "et.json").write_text(json.dumps({"schema": "1.1.0-chakra.0.0.4", "nodes": nodes}))
    (one,), _ = read_files([tmp_path / "et.json"])
    (call,) = one.calls
    assert (one.rank, call.op, call.group, call.dtype) == (1, "reduce_scatter", (1, 3), "bfloat16")
    assert (call.inputs, call.outputs) == (128, 64)


def test_execution_traces_that_name_groups_in_their_inputs(tmp_path):
    """Schema 1.0.3."""
    values = [[[1, 2, 0, 53, 8, "cuda:1"]], 34, ["7", "default_pg"], 3, "broadcast", [], [], 0, 1, 2]
    nodes = [
        {"id": 3, "name": "## process_group:init ##", "inputs": {"values": [json.dumps(INIT)]}},
        NODE | {"inputs": {"values": values}, "outputs": {"values": [values[0]]}, "attrs": []},
    ]
    for known, group in ((nodes, (1, 3)), (nodes[1:], (0, 1))):
        (tmp_path / "et.json").write_text(json.dumps({"schema": "1.0.3-chakra.0.0.4", "nodes": known}))
        (one,), _ = read_files([tmp_path / "et.json"])
        assert [(call.rank, call.op, call.group, call.inputs) for call in one.calls] == [(3, "broadcast", group, 424)]


def test_execution_traces_before_attributes(tmp_path):
    inputs = [[716, 713, 0, 6144, 4, "cuda:5"], 147, 94002303359824, 5, "all_to_allv", [768], [768]]
    node = NODE | {"inputs": inputs, "outputs": [[721, 722, 0, 3072, 4, "cuda:5"]]}
    (tmp_path / "trace.json").write_text(json.dumps({"schema": "1.0.1", "nodes": [node]}))
    (one,), _ = read_files([tmp_path / "trace.json"])
    assert (one.rank, one.calls[0].op, one.calls[0].inputs, one.calls[0].outputs) == (5, "all_to_all", 24576, 12288)


def test_chakra_graphs(tmp_path):
    nodes = [
        ("compute", 4, {"num_ops": 5}),
        ("c10d::broadcast_(0)", 7, {"tid": 1}),
        ("ring", 5, {"comm_type": 5, "comm_size": 131072, "comm_dst": 1}),
        ("ring", 6, {"comm_type": 6, "comm_size": 131072, "comm_src": 7}),
        ("sum", 7, {"comm_type": 0, "comm_size": 1 << 20}),
    ]
    (one,), _ = read_files([graph(tmp_path / "job.0.et", nodes)])
    assert [(call.op, call.peer, call.inputs) for call in one.calls] == [
        ("send", 1, 131072), ("recv", 7, 131072), ("all_reduce", None, 1 << 20),
    ]  # fmt: skip


def test_a_folder_is_read_but_for_what_is_none(tmp_path, audit):
    trace(tmp_path / "trace_0.json.gz", 0, [kernel("allreduce", 0, 1)])
    trace(tmp_path / "trace_1.json", 1, [kernel("allreduce", 0, 1)])
    (tmp_path / "readme.txt").write_text("about")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "inside").mkdir()
    code, out, _ = audit(tmp_path, "--json")
    data = json.loads(out)
    assert code == 0 and [file["rank"] for file in data["files"]] == [0, 1] and len(data["refused"]) == 1
    assert "readme.txt is something else" in data["refused"][0]


def test_the_same_rank_twice_is_read_once(tmp_path):
    for name in ("a_rank_0.json", "b_rank_0.json"):
        trace(tmp_path / name, 0, [kernel("allreduce", 0, 1)])
    recordings, refused = read_files([tmp_path])
    assert len(recordings) == 1 and "rank 0 is already read" in refused[0]


def test_one_file_without_a_rank(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps([span("aten::mm", "cpu_op", 0, 5)]))
    result = audit_files([tmp_path / "run.json"])
    assert result.files[0].unknown[0] == "which rank it is" and result.waterfalls[0].time == 5_000_000


class Malice:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def nested(depth):
    """A list of 2 to the power of `depth` values in few bytes."""
    value = [0]
    for _ in range(depth):
        value = [value, value]
    return value


INSIDE = []
INSIDE.append(INSIDE)
DUMP = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [entry("all_reduce", 0)]})
EVENT = span("aten::mm", "cpu_op", 0, 5)
HOSTILE = {
    "a truncated pickle": ("dump_rank_0", DUMP[:-30], "is damaged, or not a Flight Recorder dump"),
    "a pickle that runs something": ("dump_rank_0", pickle.dumps(Malice()), "posix.mkdir, which no file of its kind"),
    "lists without end": ("d_0", pickle.dumps([entry("all_reduce", 0, frames=nested(90))]), "or too often"),
    "a list inside itself": ("d_0", pickle.dumps([entry("all_reduce", 0, frames=INSIDE)]), "lists inside themselves"),
    "a deep list": ("d_0", b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".", "is nested too deeply"),
    "another pickle": ("dump_rank_0", pickle.dumps({"a": 1}), "is a pickle, but no Flight Recorder dump"),
    "an entry without a name": ("d_0", pickle.dumps({"entries": [{}]}), "no Flight Recorder dump"),
    "a truncated archive": ("t_0.json.gz", gzip.compress(b"{}" * 500)[:-9], "the gzip file is cut off"),
    "no archive": ("t_0.json.gz", b"\x1f\x8b" + b"x" * 40, "it is no gzip file"),
    "packed twice": ("t_0.json.gz", gzip.compress(gzip.compress(b"{}")), "is compressed twice"),
    "other JSON": ("t_0.json", {"hello": 1}, "is JSON, but not a Flight Recorder dump"),
    "numbers": ("t_0.json", [[1, 2], [3]], "is JSON, but not"),
    "an empty list": ("t_0.json", [], "is JSON, but not"),
    "half of JSON": ("t_0.json", b'{"traceEvents": [', "t_0.json is damaged, or not"),
    "deep JSON": ("t_0.json", b"[" * 200_000, "is nested too deeply"),
    "a negative duration": ("t_0.json", [EVENT | {"dur": -5}], "an event with a negative time"),
    "a negative time": ("t_0.json", [EVENT | {"ts": -5}], "an event with a negative time"),
    "no number": ("t_0.json", b'[{"ph": "X", "name": "a", "cat": "cpu_op", "ts": NaN, "dur": 1}]', "is damaged"),
    "no end of time": ("t_0.json", [EVENT | {"ts": 1e300}], "an event with a negative time"),
    "a text": ("t_0.json", [EVENT | {"ts": "5"}], "is damaged"),
    "no time": ("t_0.json", [{"ph": "X", "name": "a"}], "is damaged"),
    "an impossible size": ("d_0", pickle.dumps([entry("all_reduce", 0, size=1 << 70)]), "a size out of range"),
    "a negative size": ("d_0", pickle.dumps([entry("all_reduce", 0, size=-1)]), "a size out of range"),
    "Chakra's JSON": ("c_0.json", {"workload_graph": []}, "give the .et file"),
    "a trace of shardwise": ("t_0.json", {"traceEvents": [], "otherData": {"layout": "dp=2"}}, "for shardwise compare"),
    "no graph": ("c.0.et", b"\xff" * 20, "is no Chakra graph"),
    "half a graph": ("c.0.et", b"\x08\x12\x05", "is no Chakra graph"),
    "a database": ("report.sqlite", b"SQLite format 3\0", "such as Nsight Systems exports"),
    "an archive of files": ("t.zip", b"PK\x03\x04aa", "is an archive"),
    "nothing": ("t.json", b"", "is empty"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files(name, tmp_path, audit, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, content, words = HOSTILE[name]
    mistake(audit(write(tmp_path / file, content)), words)
    mistake(audit(write(tmp_path / file, content), "--json"), words)
    assert not (tmp_path / "pwned").exists()


def test_paths_that_cannot_be_read(tmp_path, audit):
    mistake(audit(tmp_path / "none"), "cannot read", "No such file")
    mistake(audit(tmp_path), "has no file that is a Flight Recorder dump")
    mistake(audit("/dev/zero"), "is not a regular file")
    mistake(audit(), "name files, or a program")
    started = time.monotonic()
    os.mkfifo(tmp_path / "pipe")
    mistake(audit(tmp_path / "pipe"), "is not a regular file")
    assert time.monotonic() - started < 60


def test_files_of_different_jobs(tmp_path, audit):
    trace(tmp_path / "a_0.json", 0, [EVENT], world=2)
    trace(tmp_path / "b_1.json", 1, [EVENT], world=8)
    mistake(audit(tmp_path), "files of different jobs", "2 ranks", "of 8")
    mistake(audit(trace(tmp_path / "c.json", 5, [EVENT], world=2)), "rank 5 is not one of 2 ranks")


def test_files_without_ranks(tmp_path, audit):
    for name in ("a.json", "b.json"):
        write(tmp_path / name, [EVENT])
    mistake(audit(tmp_path), "does not say which rank's it is")


def test_a_plan_without_a_time(tmp_path, audit):
    file = trace(tmp_path / "t_0.json", 0, [EVENT], world=1)
    mistake(audit(file, "--plan", tmp_path / "none.json"), "none.json")
    mistake(audit(file, "--plan", file), "t_0.json")


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_one_line(seed, tmp_path, audit):
    """Bytes of good files changed, cut out and repeated."""
    draw = random.Random(seed)
    path = [
        lambda: dumps(tmp_path / "d", [[entry("all_reduce", i) for i in range(3)]], {"0": [0]}) / "nccl_trace_rank_0",
        lambda: trace(tmp_path / "t_0.json", 0, [EVENT, kernel("allreduce", 0, 5)]),
        lambda: graph(tmp_path / "c.0.et", [("sum", 7, {"comm_type": 0, "comm_size": 8})] * 3),
    ][seed % 3]()
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        data[at : at + draw.choice((0, 1, 1, 5))] = bytes(draw.randrange(256) for _ in range(draw.choice((0, 1, 3))))
    path.write_bytes(data)
    code, out, err = audit(path)
    assert code in (0, 1, 2) and "Traceback" not in err
    if code == 2:
        mistake((code, out, err))


def test_words_of_files():
    names = {
        "nccl:_all_gather_base": "all_gather_into", "c10d::allgather_": "all_gather", "gloo:all_reduce": "all_reduce",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)": "reduce_scatter", "nccl:all_reduce_barrier": "barrier",
        "rcclKernel_AllToAll": "all_to_all", "reduce_scatter_tensor_coalesced": "reduce_scatter", "wait": "",
        "ncclKernel_SendRecv_RING": "send_recv", "nccl:send 0->1": "send", "nccl:coalesced": "",
        "_reduce_oop": "reduce", "all_to_allv": "all_to_all", "ALLGATHER_coalesced": "all_gather",
        "xccl:_reduce_scatter_base": "reduce_scatter",
    }  # fmt: skip
    assert {name: operation(name) for name in names} == names
    assert dtype_of("c10::BFloat16") == ("bfloat16", 2) and dtype_of("Tensor(long int)") == ("int64", 8)
    assert dtype_of("Float8_e4m3fn") == ("float8_e4m3fn", 1) and dtype_of("Quantized") == ("", 0)
    ranks = {
        "nccl_trace_rank_12": 12, "trace_3.json.gz": 3, "rank-34.Jul_15.1074.pt.trace.json.gz": 34, "chakra.2.et": 2,
        "worker3_step_12.169.pt.trace.json": 3, "resnet_2gpu_et.json": -1, "trace.json": -1, "dlrm_eg_5.json": 5,
    }  # fmt: skip
    assert {name: rank_in_name(f"/x7/{name}") for name in ranks} == ranks
    files = ("/usr/lib/python3.11/threading.py", "/home/me/lib/net.py")
    frames = [{"filename": file, "line": line} for line, file in enumerate(files, 1)]
    assert user_line(frames) == "/home/me/lib/net.py:2" and user_line(frames[:1]).endswith(":1") and user_line([]) == ""


def test_read_files_raises_nothing_else(tmp_path):
    with pytest.raises(UserError, match="is empty"):
        read_files([write(tmp_path / "x", b"")])
