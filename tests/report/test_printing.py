"""Results print as the tables of the command line, and render so in notebooks."""

import inspect
import re
from typing import Any

import pytest

import shardwise
from shardwise import Workload, estimate, plan, plan_serving
from shardwise.errors import UserError
from shardwise.report import compare
from shardwise.report.printing import Printable

STEP: dict[str, Any] = {"seq": 4096, "batch": 16}


@pytest.fixture(scope="module")
def results() -> dict[str, Printable]:
    predicted = [estimate("llama-3-8b", layout, cluster="8xH100", **STEP) for layout in ("dp=8,zero=2", "dp=4,tp=2")]
    best = plan("llama-3-8b", "8xH100", fixed={"pp": 1, "cp": 1}, top=3, **STEP)
    served = plan_serving("llama-3-8b", "2xH100", Workload(prompt=512, output=128, concurrency=8))
    return {"estimate": predicted[0], "plan": best, "compare": compare(*predicted), "serving plan": served}


@pytest.mark.parametrize("name", ["estimate", "plan", "compare", "serving plan"])
def test_a_result_prints_its_tables(name: str, results: dict[str, Printable], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = results[name]
    text = str(result)
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) > 10 and "\x1b" not in text
    assert re.fullmatch(rf"<{type(result).__name__}: .+>", repr(result)) and result.conclusion() in repr(result)
    assert result.conclusion() in " ".join(text.split())[:500]
    html = result._repr_html_()
    assert html.startswith("<pre") and html.endswith("</pre>")
    monkeypatch.setenv("COLUMNS", "100")
    plain = re.sub(r"<.*?>", "", html).replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'")
    assert [line.rstrip() for line in plain.splitlines()] == str(result).splitlines()


def test_names_and_numbers_in_place_of_objects() -> None:
    whole = estimate("llama-3-8b", "dp=8,zero=2", Workload(4096, 16), "8xH100")
    assert estimate("llama-3-8b", "dp=8,zero=2", cluster="8xH100", seq=4096, batch=16) == whole
    for call in (
        lambda: estimate("llama-3-8b", "dp=8", Workload(64, 8), seq=64),
        lambda: plan("llama-3-8b", "8xH100", Workload(64, 8), batch=8),
    ):
        with pytest.raises(UserError, match="either a Workload, or seq and batch"):
            call()
    with pytest.raises(UserError, match="both a sequence length and a batch"):
        plan("llama-3-8b", "8xH100", seq=64)
    with pytest.raises(UserError, match="workload must be a Workload"):
        estimate("llama-3-8b", "dp=8")


def test_public_names_are_typed_and_documented() -> None:
    for name in shardwise.__all__:
        thing = getattr(shardwise, name)
        if not callable(thing) or thing is UserError:
            continue
        assert inspect.getdoc(thing), name
        parameters = inspect.signature(thing).parameters.values()
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters), name
