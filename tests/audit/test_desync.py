"""Flight Recorder dumps: who differs, at which call and line."""

import json
import pickle
from pathlib import Path

import pytest

from harness.recordings import dumps, entry
from shardwise.audit.files.reading import read_files
from shardwise.audit.files.result import audit_files

TWO = {"0": [0, 1]}


def behind(folder):
    found = audit_files([folder]).desync
    assert found is not None
    return found


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_rank_that_did_not_enter_a_call_of_gloo(recorded, audit, form):
    code, out, _ = audit(recorded / form, "--json")
    found = json.loads(out)["desync"]
    assert code == 1 and found["ranks"] == [2] and found["kind"] == "skipped" and found["sure"]
    assert found["text"].startswith("rank 2 did not enter all_reduce 2 of 20 B float32 on ranks 0-2")
    assert found["op"] == "all_reduce" and "behind all_reduce 1 of 400 B" in found["waiting"][2]
    if form == "pickle":
        file, _, line = found["where"].rpartition(":")
        text = Path(file).read_text().splitlines()[int(line) - 1]
        assert Path(file).name == "recorded_jobs.py" and "async_op=True" in text


def test_both_forms_of_a_dump_are_equal(recorded):
    pickled, texts = (read_files([recorded / form])[0] for form in ("pickle", "json"))
    for a, b in zip(pickled, texts, strict=True):
        assert [(c.op, c.group, c.inputs, c.dtype, c.state, c.begin) for c in a.calls] == [
            (c.op, c.group, c.inputs, c.dtype, c.state, c.begin) for c in b.calls
        ]


def test_the_sentence_names_rank_call_and_line(tmp_path, audit):
    ranks = [[entry("all_reduce", 0), entry("_all_gather_base", 1, state="started", line=20)], [entry("all_reduce", 0)]]
    code, out, err = audit(dumps(tmp_path / "d", ranks, TWO))
    text = " ".join(out.split())
    assert (code, err) == (1, "")
    assert text.startswith(
        "rank 1 did not enter all_gather_into 2 of 32 B float32 on ranks 0-1 at /home/me/train.py:20,"
    )
    assert "rank 1: behind all_reduce 1 of 32 B float32 on ranks 0-1 at /home/me/train.py:10" in text
    assert audit(dumps(tmp_path / "equal", [ranks[1]] * 2, TWO))[0] == 0


def test_a_ring_buffer_that_lost_the_first_calls_of_one_rank(tmp_path):
    long = [entry("broadcast" if i < 5 else "all_reduce", i) for i in range(10)]
    assert audit_files([dumps(tmp_path / "d", [long, long[6:]], TWO)]).desync is None
    found = behind(dumps(tmp_path / "e", [long, long[6:9]], TWO))
    assert (found.kind, found.ranks) == ("skipped", (1,)) and " all_reduce 10 of 32 B" in found.text
    assert any("the first 6 calls" in what for file in audit_files([tmp_path / "e"]).files for what in file.unknown)


def test_a_call_that_all_entered_and_none_left(tmp_path, audit):
    ranks = [[entry("all_reduce", 0, state="started")], [entry("all_reduce", 0, state="scheduled")]]
    found = behind(dumps(tmp_path / "d", ranks, TWO))
    assert (found.kind, found.ranks) == ("unfinished", (0, 1)) and "all ranks entered" in found.text
    assert audit(tmp_path / "d")[0] == 0
    for rank in ranks:
        rank[0]["retired"] = True  # the watchdog has given up on it
    assert behind(dumps(tmp_path / "d", ranks, TWO)) == found
    ranks[1][0]["state"] = "completed"
    assert audit_files([dumps(tmp_path / "e", ranks, TWO)]).desync is None


def test_a_rank_without_a_dump(tmp_path, audit):
    """Its group is in the dumps of the others."""
    ranks = [[entry("all_reduce", 0), entry("all_reduce", 1, state="started")]] * 2
    for name, groups in (("d", {"0": [0, 1, 2]}), ("gloo", {"": [0, 1, 2]})):
        found = behind(dumps(tmp_path / name, ranks, groups))
        assert (found.kind, found.ranks) == ("silent", (2,)) and found.text.startswith("all_reduce 2 of 32 B")
    code, out, _ = audit(tmp_path / "d")
    assert code == 1 and "waits for rank 2, which left no recording" in " ".join(out.split())
    assert "no file of rank 2" in out
    ranks[0][1]["state"] = "completed"
    assert audit_files([dumps(tmp_path / "e", ranks, {"0": [0, 1, 2]})]).desync is None


def test_the_rank_that_waits_nowhere_is_the_cause(tmp_path):
    """Ranks 0 and 1 wait for 2; 2 waits in another group for 3, which stands still."""
    groups = {"0": [0, 1, 2], "7": [2, 3]}
    stuck = entry("all_reduce", 0, state="started", at=1)
    ranks = [[stuck], [stuck], [entry("all_gather", 0, group="7", state="started", at=2)], []]
    found = behind(dumps(tmp_path / "d", ranks, groups))
    assert (found.kind, found.ranks) == ("skipped", (3,)) and "on ranks 2-3" in found.text
    assert found.waiting[3] == "rank 3: no call yet"


def test_ranks_that_wait_for_each_other(tmp_path):
    groups = {"1": [0, 1], "2": [1, 2], "3": [0, 2]}
    ranks = [[entry("all_reduce", 0, group=group, state="started")] for group in groups]
    found = behind(dumps(tmp_path / "d", ranks, groups))
    assert (found.kind, found.sure) == ("waiting", False)
    assert "rank 0 makes all_reduce 1 of 32 B float32 on ranks 0-1" in found.text and "rank 1 makes" in found.text


def test_a_message_without_its_other_end(tmp_path):
    sends = [entry("send 0->1", i, is_p2p=True) for i in range(2)]
    receives = [entry("recv 1<-0", i, is_p2p=True, state="completed" if i < 2 else "started") for i in range(3)]
    found = behind(dumps(tmp_path / "d", [sends, receives], TWO))
    assert (found.kind, found.ranks, found.op) == ("skipped", (0,), "send")
    assert found.text.startswith("rank 0 made no send for recv of 32 B float32 from rank 0")


def test_peers_are_global_ranks(tmp_path):
    ranks = [[], [], [entry("send 0->1", 0, group="5")], [entry("recv 1<-0", 0, group="5")]]
    recordings, _ = read_files([dumps(tmp_path / "d", ranks, {"5": [2, 3]})])
    assert [one.calls[0].peer for one in recordings if one.calls] == [3, 2]


def test_the_list_of_torch_2_2(tmp_path):
    """Version 1 has no version, no groups, no dtypes, and counts by `seq_id`."""
    for rank, count in enumerate((3, 2)):
        old = [entry("all_reduce", i, state="completed" if i < 2 else "started") for i in range(count)]
        for one in old:
            one["seq_id"] = one.pop("collective_seq_id")
            for key in ("process_group", "input_dtypes", "output_dtypes", "record_id", "retired"):
                del one[key]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(old))
    result = audit_files([tmp_path])
    assert result.desync and result.desync.ranks == (1,) and "all_reduce 3 on ranks 0-1" in result.desync.text
    assert "dtypes and bytes (of this version)" in result.files[0].unknown


def test_groups_without_ranks_are_those_whose_files_name_them(tmp_path):
    ranks = [[entry("all_reduce", 0, group=str(1 + rank // 2), backend="gloo")] for rank in range(4)]
    recordings, _ = read_files([dumps(tmp_path / "d", ranks, {"": []})])
    assert [one.calls[0].group for one in recordings] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    (axis,) = audit_files([tmp_path / "d"]).axes
    assert (axis.size, axis.stride, axis.groups, axis.calls, axis.nbytes) == (
        2, 1, 2, {"all_reduce": 1.0}, {"all_reduce": 32.0},
    )  # fmt: skip


def test_the_use_of_an_axis_is_known_by_passes(tmp_path):
    for thread, use in (("pt_autograd_0", "gradients are all-reduced in the backward pass"), ("", "")):
        calls = [entry("all_reduce", 0, size=800, thread_name=thread)]
        (axis,) = audit_files([dumps(tmp_path / f"d{thread}", [calls] * 2, TWO)]).axes
        assert axis.guess == use


def test_both_ends_of_a_message_may_be_in_either_list(tmp_path):
    """NCCL lists what is received as an output; sizes that differ are named."""
    for size, kind in ((8, None), (9, "waiting")):
        sends = [entry("send 0->1", 0, is_p2p=True, output_sizes=[], output_dtypes=[])]
        receives = [entry("recv 1<-0", 0, is_p2p=True, input_sizes=[], input_dtypes=[], output_sizes=[[size]])]
        found = audit_files([dumps(tmp_path / f"{size}", [sends, receives], TWO)]).desync
        assert (found and found.kind) == kind
