"""The HTTP surface against requests made from its own description: no answer is a 5xx, and what fits is not refused.

Values are drawn from the schemas of /openapi.json, as they are and with something changed.
"""

import json
from collections.abc import Iterator

import pytest
from described_requests import ANYTHING, ASKED, DESCRIBED, changed, is_described, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_double import Running, serving

from shardwise import __version__
from shardwise.serving.http.openapi import description

ODD = ("/", "/v1/models/%00", "/v1//models", "/v1/models/a/b", "/v1/completions/")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("fuzzed"), slots=64, queue=1000) as running:
        yield running


@pytest.mark.parametrize("path", ASKED)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_described_is_answered(server, path, data):
    body = data.draw(values(ASKED[path]))
    status, answer, _ = server.ask("POST", path, body)
    is_described(status, answer, path)
    if status == 200:
        return
    # What no schema can say: lengths, the model's own names, and fields that depend on each other.
    error = answer["error"]
    known = error["code"] in ("context_length_exceeded", "model_not_found")
    related = ("stream_options", "prompt", "n", "max_tokens", "top_logprobs")
    assert known or error["param"] in related or "template" in error["message"], error
    assert "must be" not in error["message"] and "not a field" not in error["message"], error


@pytest.mark.parametrize("path", ASKED)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_is_not_described_is_refused_and_nothing_dies(server, path, data):
    status, answer, _ = server.ask("POST", path, data.draw(changed(path)))
    is_described(status, answer, path)


@settings(max_examples=50)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]),
    path=st.sampled_from([*DESCRIBED["paths"], *ODD]),
    body=st.binary(max_size=60) | ANYTHING.map(lambda value: json.dumps(value).encode()),
    kind=st.sampled_from(["application/json", "application/json; charset=utf-8", "text/plain", ""]),
)
def test_any_method_on_any_path_with_any_bytes(server, method, path, body, kind):
    path = path.replace("{model}", "x")
    status, _, _ = server.ask(method, path, body, {"content-type": kind})
    assert status < 500


def test_every_described_path_answers_and_the_description_is_served(server):
    assert server.ask("GET", "/openapi.json")[1] == json.loads(json.dumps(description(__version__)))
    for path, operations in DESCRIBED["paths"].items():
        for method in operations:
            status, _, _ = server.ask(method.upper(), path, {} if method == "post" else None)
            assert status not in (405, 500) and str(status) in operations[method]["responses"], path


def test_afterwards_nothing_is_left(server):
    assert server.post("/v1/completions", prompt="ab", max_tokens=3)[1]["choices"][0]["text"] == "aba"
    assert server.front.open == 0 and not server.front.live
