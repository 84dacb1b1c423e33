"""Sizing questions of `agent_questions.toml`, answered by --json alone, against published numbers and arithmetic."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.documents import ROOT

QUESTIONS = tomllib.loads(Path(__file__).with_name("agent_questions.toml").read_text(encoding="utf-8"))["questions"]


def field_of(data: Any, at: str) -> Any:
    for name in at.split("/"):
        if isinstance(data, list) and "=" in name:
            key, value = name.split("=", 1)
            (data,) = (row for row in data if row[key] == value)
        else:
            data = data[int(name) if isinstance(data, list) else name]
    return data


@pytest.mark.parametrize("question", QUESTIONS, ids=[question["ask"] for question in QUESTIONS])
def test_a_question_is_answered_by_one_field(question: dict[str, Any], command: Callable[..., Any]) -> None:
    code, out, err = command(*shlex.split(question["command"]), "--json")
    value = field_of(json.loads(out), question["at"])
    assert (code, err) == ((2, f"shardwise: error: {value}\n") if question["at"] == "error" else (0, ""))
    match question:
        case {"is": expected}:
            assert value == (None if expected == "nothing" else expected)
        case {"near": expected}:
            assert value == pytest.approx(expected, rel=0.01)
        case {"between": [low, high]}:
            assert low <= value <= high
        case {"has": expected}:
            assert expected in value
        case {"largest": expected}:
            assert max(value, key=value.get) == expected
        case _:
            raise AssertionError("a question without an expected value")


def test_there_are_enough_questions_and_each_has_its_source() -> None:
    assert len({question["ask"] for question in QUESTIONS}) == len(QUESTIONS) >= 30
    assert all(question["why"] for question in QUESTIONS)


def test_the_page_names_fields_that_questions_read() -> None:
    page = (ROOT / "docs" / "for_agents.md").read_text(encoding="utf-8")
    row = re.compile(
        r"^\| (.*?) \| (?:the same|`(?:estimate|plan|list|explain|emit) .*?) \| `([\w/]+?)(?:/STAGE/GPUS)?`", re.M
    )
    fields = row.findall(page)
    assert len(fields) >= 14
    for question, field in fields:
        assert any(f"{asked['at']}/".startswith(f"{field}/") for asked in QUESTIONS), question
    assert f"asks {len(QUESTIONS)} such questions" in page


def test_the_index_for_agents_names_pages_that_exist() -> None:
    pages = re.findall(r"\]\((\S+)\)", (ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert len(pages) > 5 and all((ROOT / page).is_file() for page in pages)
