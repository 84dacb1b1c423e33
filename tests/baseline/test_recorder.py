"""The recorder: it tells differences by place, and rounding from differences. The whole comparison is a script."""

import json
import lzma
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import questions
import recorder

RECORDED = [json.loads(line) for line in lzma.decompress(recorder.RECORDING.read_bytes()).decode().splitlines()]


def test_the_recording_holds_what_it_says():
    kinds = [answer["kind"] for answer in RECORDED]
    assert {kind: kinds.count(kind) for kind in recorder.COUNTS} == recorder.COUNTS
    rejected = [answer for answer in RECORDED if answer["code"]]
    assert len(rejected) == sum(recorder.REJECTED.values()) and all(answer["result"] is None for answer in rejected)
    estimates = [answer["command"] for answer in RECORDED if answer["kind"] == "estimate"]
    assert len({command[1] for command in estimates}) >= len(questions.MODELS)


def test_differences_are_told_by_their_path():
    was = {"a": [1, {"b": 2.0}], "c": "x", "d": None}
    assert list(recorder.differences(was, was)) == []
    now = {"a": [1, {"b": 2.5}, 3], "c": "y", "e": 1}
    assert list(recorder.differences(was, now)) == [
        ("a[1].b", 2.0, 2.5),
        ("a[2]", "(absent)", 3),
        ("c", "x", "y"),
        ("d", None, "(absent)"),
        ("e", "(absent)", 1),
    ]


def test_another_order_of_keys_is_a_difference():
    assert [row[0] for row in recorder.differences({"a": 1, "b": 2}, {"b": 2, "a": 1})] == [" (order of keys)"]


def test_rounding_is_told_from_a_difference():
    assert recorder.only_rounding(1.0, 1.0 + 2**-52)
    assert not recorder.only_rounding(1.0, 1.0001) and not recorder.only_rounding(1, 2)


def test_a_changed_number_fails_the_comparison(capsys):
    answer = next(answer for answer in RECORDED if answer["kind"] == "estimate" and answer["code"] == 0)
    changed = json.loads(json.dumps(answer))
    changed["result"]["roles"][0]["bytes"]["gradients"] += 4
    assert recorder.compare([changed], every=1) == 1
    printed = capsys.readouterr().out
    assert "1 different" in printed and "estimate result.roles[].bytes.gradients: 1 values in 1 answers" in printed
