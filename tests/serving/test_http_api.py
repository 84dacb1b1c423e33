"""The HTTP interface on a double of the engine: answers, streams, what is refused and in which words."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from serving_double import CONTEXT, MODEL, Running, serving

from harness.cases import from_table, table
from shardwise.serving.http.server import bind, is_public

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("served")) as running:
        yield running


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- answers


def test_a_completion_has_the_shape_and_the_counts(server):
    status, answer, _ = server.post(COMPLETIONS, model=MODEL, prompt="abc", max_tokens=7)
    assert status == 200
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == MODEL
    assert answer["choices"] == [{"index": 0, "text": "abcabca", "logprobs": None, "finish_reason": "length"}]
    counts = {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert answer["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 1}}


def test_the_token_that_ends_is_counted_and_not_shown(server):
    _, answer, _ = server.post(COMPLETIONS, prompt="abc\0", max_tokens=50)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("abc", "stop", 4)


@from_table
def test_prompts_are_texts_or_tokens_one_or_several(server, prompt, texts):
    _, answer, _ = server.post(COMPLETIONS, prompt=prompt, max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_several_choices_have_seeds_of_their_own(server):
    _, answer, _ = server.post(COMPLETIONS, prompt=["ab", "cd"], n=2, max_tokens=2, seed=5)
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 8
    seeds = [request.sampling.seed for request in server.engine.submitted[-4:]]
    assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] not in (5, 6)


def test_what_is_asked_of_the_engine_is_what_was_asked_for(server):
    server.post(COMPLETIONS, prompt="ab", max_tokens=2, temperature=0.5, top_p=0.25, top_k=3, seed=-1)
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 3, 2)
    assert sampling.seed >= 0 and sampling.stop_tokens == (256,)
    server.post(COMPLETIONS, prompt="ab", max_tokens=2)
    server.post(COMPLETIONS, prompt="ab", max_tokens=None, temperature=None)
    first, second = (request.sampling for request in server.engine.submitted[-2:])
    assert first.temperature == second.temperature == 1.0 and second.max_tokens == 16 and first.seed != second.seed


def test_a_chat_answers_what_the_template_makes_of_it(server):
    status, answer, _ = server.post(CHATS, messages=HELLO, max_completion_tokens=8, max_tokens=99)
    assert status == 200 and answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "[-user-]", "refusal": None}
    assert choice["finish_reason"] == "length"
    prompt = "[-user-]hello[-end-][-assistant-]"
    assert bytes(server.engine.submitted[-1].prompt).decode() == prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_a_chat_without_a_limit_may_fill_the_context(server):
    server.post(CHATS, messages=HELLO)
    request = server.engine.submitted[-1]
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)


def test_parts_names_and_developers_reach_the_template(server):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    echoed = {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None, "annotations": []}
    status, _, _ = server.post(CHATS, messages=[*messages, echoed, *HELLO], max_tokens=1)
    assert status == 200
    prompt = bytes(server.engine.submitted[-1].prompt).decode()
    middle = "[-user-]one\ntwo[-end-][-assistant-]ok[-end-]"
    assert prompt == f"[-system-]be brief[-end-]{middle}[-user-]hello[-end-][-assistant-]"


@pytest.mark.parametrize("stop", ["bc", ["zz", "bc"], ["c", "bc"]])
def test_a_stop_string_ends_the_answer_and_cancels_the_request(server, stop):
    _, answer, _ = server.post(COMPLETIONS, prompt="abcd", max_tokens=100, stop=stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == "a"
    assert answer["usage"]["completion_tokens"] == 3
    # Known when the engine has ended it, which is after its text has.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    last = server.events(COMPLETIONS, prompt="abcd", max_tokens=100, stop=stop, stream_options={"include_usage": True})[
        -2
    ]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert server.engine.submitted[-1].id in server.engine.cancels
    until(lambda: server.front.open == 0)


def test_probabilities_of_chosen_tokens(server):
    _, answer, _ = server.post(COMPLETIONS, prompt="aé", max_tokens=4, logprobs=0)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "�", "�", "a"] and told["text_offset"] == [0, 1, 1, 2]
    assert told["token_logprobs"] == [-0.5] * 4 and told["top_logprobs"] is None
    _, answer, _ = server.post(CHATS, messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=0)
    entry = {"token": "[", "logprob": -0.5, "bytes": [91], "top_logprobs": []}
    assert answer["choices"][0]["logprobs"]["content"][0] == entry
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2


def test_likeliest_tokens_are_given_to_those_who_ask(server):
    _, answer, _ = server.post(COMPLETIONS, prompt="ab", max_tokens=2, logprobs=2)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "@": -1.5}, {"b": -0.5, "@": -1.5}]
    _, answer, _ = server.post(COMPLETIONS, prompt="é", max_tokens=1, logprobs=1)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"�": -0.5}]
    _, answer, _ = server.post(CHATS, messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=2)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in entry["top_logprobs"]] == ["[", "@"] and entry["top_logprobs"][1]["bytes"] == [64]


def test_the_token_that_ends_has_its_probability_in_a_completion_alone(server):
    _, answer, _ = server.post(COMPLETIONS, prompt="ab\0", max_tokens=9, logprobs=0)
    told = answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "b", "<|end|>"] and told["text_offset"] == [0, 1, 2]
    assert len(told["tokens"]) == answer["usage"]["completion_tokens"]
    chat = [{"role": "user", "content": "\0"}]
    _, answer, _ = server.post(CHATS, messages=chat, max_tokens=40, logprobs=True, stop_token_ids=[ord("]")])
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "[-user-" == bytes(one["bytes"][0] for one in content).decode()


# -- prompts that are given back and scored


def test_a_prompt_is_given_back_before_its_answer(server):
    _, answer, _ = server.post(COMPLETIONS, prompt=["ab", "é<|user|>"], max_tokens=2, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["abab", "é<|user|>é"]
    _, answer, _ = server.post(COMPLETIONS, prompt=[97, 98], max_tokens=0, echo=True, n=2)
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("ab", "length")] * 2
    assert answer["usage"]["completion_tokens"] == 0 and server.front.open == 0 and not server.front.live
    *chunks, _ = server.events(COMPLETIONS, prompt="ab", max_tokens=3, echo=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks][:2] == ["ab", "a"]


SCORED = {"logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}


@pytest.mark.parametrize("prompt", ["aéb", [[97, 0xC3, 0xA9, 98]]])
def test_a_scored_prompt_has_the_shape_that_evaluation_harnesses_read(server, prompt):
    _, answer, _ = server.post(COMPLETIONS, prompt=prompt, max_tokens=1, **SCORED)
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "aéba" and told["text_offset"] == [0, 1, 1, 2, 3]
    assert told["tokens"] == ["a", "�", "�", "b", "a"]
    assert told["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5]
    assert told["top_logprobs"] == [None, {"�": -1.0}, {"�": -2.0}, {"b": -3.0}, {"a": -0.5}]
    assert server.engine.submitted[-1].sampling.prompt_logprobs
    _, answer, _ = server.post(COMPLETIONS, prompt=prompt, max_tokens=0, **SCORED)
    alone = answer["choices"][0]
    assert alone["text"] == "aéb" and alone["finish_reason"] == "length"
    assert alone["logprobs"] == {name: values[:-1] for name, values in told.items()}


def test_scored_prompts_come_in_batches_and_in_streams(server):
    prompts = [[97, 98], [99], [100, 101, 102]]
    _, answer, _ = server.post(COMPLETIONS, prompt=prompts, max_tokens=0, n=2, **SCORED)
    told = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert told == [[None, -1.0]] * 2 + [[None]] * 2 + [[None, -1.0, -2.0]] * 2
    *chunks, _ = server.events(COMPLETIONS, prompt="abc", max_tokens=2, stop=["b"], **SCORED)
    first, *_, last = [chunk["choices"][0] for chunk in chunks]
    assert first["text"] == "abc" and first["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert last["finish_reason"] == "stop" and "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abca"


def test_a_scored_prompt_may_fill_the_context(server):
    assert server.post(COMPLETIONS, prompt="a" * CONTEXT, max_tokens=0, **SCORED)[0] == 200
    refused(server.post(COMPLETIONS, prompt="a" * (CONTEXT + 1), max_tokens=0, **SCORED), 400, "prompt", f"{CONTEXT}")
    refused(server.post(COMPLETIONS, prompt=[5] * 20_000, **SCORED), 400, "prompt", "20000 tokens")
    refused(server.post(COMPLETIONS, prompt="", max_tokens=0, **SCORED), 400, "prompt", "empty")


# -- ends


def test_ends_and_stop_strings_may_be_special_tokens(server):
    for stop, text in (("<|end|>", "ab"), ("b<|end|>", "a"), (["x", "ab<|end|>"], "")):
        _, answer, _ = server.post(COMPLETIONS, prompt="ab\0", max_tokens=9, stop=stop)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
        *chunks, _ = server.events(COMPLETIONS, prompt="ab\0", max_tokens=9, stop=stop)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    # In the middle of an answer, where nothing else would end it.
    _, answer, _ = server.post(COMPLETIONS, prompt=[97, 257, 98], max_tokens=9, stop="<|user|>b")
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a", "stop")


def test_other_ends_fewer_ends_and_later_ends(server):
    _, answer, _ = server.post(COMPLETIONS, prompt="abc", max_tokens=9, stop_token_ids=[99])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "stop")
    server.post(COMPLETIONS, prompt="ab", max_tokens=1, stop_token_ids=[99], ignore_eos=True, min_tokens=3)
    sampling = server.engine.submitted[-1].sampling
    assert sampling.stop_tokens == (99,) and sampling.min_tokens == 3
    _, answer, _ = server.post(COMPLETIONS, prompt="ab\0", max_tokens=5, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5
    _, answer, _ = server.post(COMPLETIONS, prompt="ab", max_tokens=9, stop="b", min_tokens=3)
    assert answer["choices"][0]["text"] == "aba"


# -- streams


def test_a_streamed_completion_is_the_whole_one_in_pieces(server):
    *chunks, done = server.events(COMPLETIONS, prompt="añb", max_tokens=6, stream_options={"include_usage": True})
    assert done == "[DONE]"
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6 and last["usage"]["prompt_tokens"] == 4
    assert {chunk["object"] for chunk in chunks} == {"text_completion"} and len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert "".join(piece["text"] for piece in pieces) == "añba"
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all("�" not in piece["text"] for piece in pieces[:-1]), "half a character"


def test_a_streamed_chat_begins_with_the_role(server):
    first, *chunks, done = server.events(CHATS, messages=HELLO, max_tokens=8)
    assert done == "[DONE]" and first["object"] == "chat.completion.chunk" and "usage" not in first
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "[-user-]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_choices_of_a_stream_come_under_their_numbers(server):
    *chunks, _ = server.events(COMPLETIONS, prompt=["ab", "xyz"], n=2, max_tokens=5)
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["ababa", "ababa", "xyzxy", "xyzxy"]
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 4


def test_a_stream_holds_back_what_may_become_a_stop_string(server):
    *chunks, _ = server.events(COMPLETIONS, prompt="abcx", max_tokens=50, stop="xab")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


# -- values that ask for nothing

NOTHING = table(__file__, "NOTHING")
OF_COMPLETIONS = {"suffix": "", "logprobs": False, "add_special_tokens": True, "max_tokens": None}
OF_CHATS = {
    "tools": [], "tool_choice": "none", "top_logprobs": 0, "logprobs": False, "chat_template_kwargs": {},
    "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "audio": None,
    "reasoning_effort": None, "documents": None, "chat_template": None, "max_completion_tokens": None,
}  # fmt: skip


@pytest.mark.parametrize("name", [*NOTHING, *OF_COMPLETIONS])
def test_values_without_effect_are_accepted_by_completions(server, name):
    value = (NOTHING | OF_COMPLETIONS)[name]
    for body in ({name: value}, {name: None}):
        status, answer, _ = server.post(COMPLETIONS, prompt="ab", temperature=0, **body)
        assert status == 200 and answer["choices"][0]["text"] == "ab" * 8


@pytest.mark.parametrize("fields", [NOTHING | OF_CHATS, dict.fromkeys(NOTHING | OF_CHATS)])
def test_values_without_effect_are_accepted_by_chats(server, fields):
    status, answer, _ = server.post(CHATS, messages=HELLO, max_tokens=3, **fields)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "[-u"


@pytest.mark.parametrize("answer", [{"content": None}, {}, {"content": None, "reasoning": None, "type": "text"}])
def test_an_answer_without_content_may_be_handed_back(server, answer):
    status, _, _ = server.post(CHATS, messages=[*HELLO, {"role": "assistant", **answer}, *HELLO], max_tokens=1)
    assert status == 200
    prompt = bytes(server.engine.submitted[-1].prompt).decode()
    assert prompt == "[-user-]hello[-end-][-assistant-][-end-][-user-]hello[-end-][-assistant-]"


# -- what is refused


def refused(answered, status: int, param: str | None, *words: str) -> dict:
    code, answer, headers = answered
    assert code == status, answer
    assert headers["content-type"] == "application/json"
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert all(word in answer["error"]["message"] for word in words), answer
    return answer["error"]


@from_table
def test_a_wrong_completion_is_refused_by_the_name_of_its_field(server, fields, param, words):
    error = refused(server.post(COMPLETIONS, **fields), 400, param, *words)
    assert error["type"] == "invalid_request_error"


@from_table
def test_a_wrong_chat_is_refused_by_the_name_of_its_field(server, fields, param, words):
    refused(server.post(CHATS, **fields), 400, param, *words)


def test_a_prompt_beyond_the_context_hears_the_largest_that_fits(server):
    error = refused(server.post(COMPLETIONS, prompt="a" * CONTEXT), 400, "prompt", str(CONTEXT), f"{CONTEXT - 1}")
    assert error["code"] == "context_length_exceeded"
    error = refused(server.post(COMPLETIONS, prompt="a" * 150, max_tokens=51), 400, "prompt", "at most 50", "149")
    assert error["code"] == "context_length_exceeded"
    assert server.post(COMPLETIONS, prompt="a" * 150, max_tokens=50)[0] == 200


def test_an_answer_of_the_usual_length_is_as_short_as_the_context_makes_it(server):
    _, answer, _ = server.post(COMPLETIONS, prompt="a" * (CONTEXT - 5))
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"


@from_table
def test_malformed_bodies_are_400(server, body, words):
    refused(server.ask("POST", COMPLETIONS, body), 400, None, *words)


def test_numbers_too_large_for_a_float_are_400(server):
    body = b'{"prompt": "a", "temperature": 1e400}'
    refused(server.ask("POST", COMPLETIONS, body), 400, "temperature", "at most 2")


def test_ten_megabytes_are_413_and_the_server_goes_on(server):
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    refused(server.ask("POST", COMPLETIONS, body), 413, None, "4,194,304")
    refused(server.post(COMPLETIONS, prompt="a" * 1_000_000), 400, "prompt", "1,000,000 characters", str(CONTEXT))
    long = [{"role": "user", "content": [{"type": "text", "text": "a" * 1_000_000}]}]
    refused(server.post(CHATS, messages=long), 400, "messages", "1,000,000 characters")
    refused(server.post(COMPLETIONS, prompt=[5] * 300_000), 400, "prompt", "300000 tokens")
    assert server.post(COMPLETIONS, prompt="a")[0] == 200


def test_other_kinds_of_bodies_paths_and_methods(server):
    plain = {"content-type": "text/plain"}
    refused(server.ask("POST", COMPLETIONS, {"prompt": "a"}, plain), 415, None, "text/plain", "application/json")
    # As a page's request without a type, for which a browser asks nobody.
    refused(server.ask("POST", COMPLETIONS, {"prompt": "a"}, {"content-type": ""}), 415, None, "application/json")
    refused(server.ask("GET", "/v2/nothing"), 404, None, "GET /v2/nothing")
    refused(server.ask("DELETE", COMPLETIONS), 405, None, "not allowed")


def test_another_model_is_404_and_names_the_served_one(server):
    error = refused(server.post(COMPLETIONS, prompt="a", model="gpt-9\ud800"), 400, "model", "surrogate")
    error = refused(server.post(COMPLETIONS, prompt="a", model="gpt-9"), 404, "model", "gpt-9", MODEL)
    assert error["code"] == "model_not_found"
    refused(server.ask("GET", "/v1/models/gpt-9"), 404, "model", MODEL)
    assert server.ask("GET", f"/v1/models/{MODEL}")[1]["id"] == MODEL


def test_the_models_are_the_one(server):
    _, answer, _ = server.ask("GET", "/v1/models")
    (card,) = answer["data"]
    assert answer["object"] == "list" and card["id"] == MODEL and card["object"] == "model"
    assert card["max_model_len"] == CONTEXT and card["chat"] is True


def test_a_model_without_a_template_completes_and_does_not_chat(tmp_path: Path):
    with serving(tmp_path, template=None) as server:
        error = refused(server.post(CHATS, messages=HELLO), 400, "messages", "no chat template", COMPLETIONS)
        assert error["code"] == "no_chat_template"
        assert server.post(COMPLETIONS, prompt="a")[0] == 200
        assert server.ask("GET", "/v1/models")[1]["data"][0]["chat"] is False


def test_the_key_is_asked_for_where_there_is_one(tmp_path: Path):
    with serving(tmp_path, api_key="s3cret") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            error = refused(server.ask("GET", "/v1/models", headers=headers), 401, None, "API key")
            assert error["code"] == "invalid_api_key"
        assert server.ask("GET", "/v1/models", headers={"authorization": "Bearer s3cret"})[0] == 200
        assert server.ask("GET", "/health")[0] == server.ask("GET", "/metrics")[0] == 200
        described = server.ask("GET", "/openapi.json")[1]
        assert described["paths"][COMPLETIONS]["post"]["security"] == [{"key": []}]
        assert "security" not in described["paths"]["/metrics"]["get"]


def test_metrics_need_the_key_where_other_hosts_reach_them(tmp_path: Path):
    with serving(tmp_path, api_key="s3cret", public=True) as server:
        refused(server.ask("GET", "/metrics"), 401, None, "API key")
        assert server.ask("GET", "/metrics", headers={"authorization": "Bearer s3cret"})[0] == 200
        assert server.ask("GET", "/health")[0] == 200
        described = server.ask("GET", "/openapi.json")[1]
        assert described["paths"]["/metrics"]["get"]["security"] == [{"key": []}]
    with serving(tmp_path, public=True) as server:
        assert server.ask("GET", "/metrics")[0] == 200


@pytest.mark.parametrize(("host", "public"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_a_public_address_is_one_that_other_hosts_reach(host: str, public: bool):
    with bind(host, 0) as sock:
        assert is_public(sock) == public


BODY = b'{"prompt": "a", "max_tokens": 1}'
LENGTH, CHUNKED = b"content-length: %d\r\n" % len(BODY), b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
KEY = b"authorization: Bearer key\r\n"


@from_table
def test_requests_that_proxies_read_otherwise_are_rejected_and_end_the_connection(tmp_path, headers, body, words):
    with serving(tmp_path, api_key="key") as server:
        way = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        way.sendall(head + headers + b"\r\n" + body)
        response = http.client.HTTPResponse(way)
        response.begin()
        error = json.loads(response.read())["error"]
        assert response.status == 400 and words in error["message"] and error["type"] == "invalid_request_error"
        assert response.headers["connection"] == "close" and not server.engine.submitted
        with suppress(ConnectionResetError):
            assert way.recv(1) == b""
        way.close()


# -- clients that leave, queues that fill, engines that fail


def raw(server: Running, path: str, **body) -> socket.socket:
    data = json.dumps(body).encode()
    way = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    way.sendall(head.encode() + data)
    return way


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_what_it_asked_for(tmp_path, stream):
    with serving(tmp_path, pause=0.01) as server:
        way = raw(server, COMPLETIONS, prompt="ab", max_tokens=190, stream=stream, n=2)
        until(lambda: len(server.engine.submitted) == 2 and server.engine.load()[0].running == 2)
        if stream:
            assert b"200 OK" in way.recv(1000)
        way.close()
        until(lambda: server.front.open == 0 and not server.front.live)
        assert {1, 2} <= set(server.engine.cancels)
        assert server.front.metrics.finished == {(("reason", "cancelled"),): 2}
        assert server.front.metrics.generated_tokens < 2 * 190


def test_a_client_that_leaves_before_its_body_is_there_is_no_server_s_error(tmp_path):
    with serving(tmp_path) as server:
        way = socket.create_connection(("127.0.0.1", server.port))
        kind = "content-type: application/json"
        way.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{kind}\r\ncontent-length: 100\r\n\r\n{{".encode())
        until(lambda: server.front.readers)
        way.close()
        until(lambda: not server.front.readers and server.front.metrics.requests)
        assert server.front.metrics.requests == {(("path", COMPLETIONS), ("status", "499")): 1}


def test_more_prompts_than_places_are_refused_before_they_are_read(tmp_path, monkeypatch):
    with serving(tmp_path, slots=2, queue=3) as server:
        monkeypatch.setattr(server.front.text, "encode_all", lambda texts: pytest.fail("they are tokens already"))
        refused(server.post(COMPLETIONS, prompt=["a"] * 6), 400, "prompt", "6 sequences", "5 of this server")
        refused(server.post(COMPLETIONS, prompt=["a"] * 3, n=2), 400, "n", "6 sequences")


def test_over_the_queue_limit_is_429_with_a_time_to_come_back(tmp_path):
    with serving(tmp_path, slots=2, queue=3) as server:
        server.engine.hold = True
        ways = [raw(server, COMPLETIONS, prompt="ab", max_tokens=3) for _ in range(5)]
        until(lambda: server.front.open == 5)
        code, answer, headers = server.post(COMPLETIONS, prompt="ab")
        refused((code, answer, headers), 429, None, "5 of 5")
        assert answer["error"]["code"] == "queue_full" and 1 <= int(headers["retry-after"]) <= 60
        text = server.ask("GET", "/metrics")[1]
        assert "shardwise_sequences_running 2\n" in text and "shardwise_sequences_waiting 3\n" in text
        server.engine.hold = False
        for way in ways:
            response = http.client.HTTPResponse(way)
            response.begin()
            assert json.loads(response.read())["choices"][0]["text"] == "aba"
            way.close()
        assert server.post(COMPLETIONS, prompt="ab", max_tokens=1)[0] == 200


def test_when_the_engine_fails_every_client_hears_why(tmp_path):
    with serving(tmp_path, pause=0.01) as server:
        stream = raw(server, CHATS, messages=HELLO, stream=True)
        whole = raw(server, COMPLETIONS, prompt="ab", max_tokens=150)
        until(lambda: server.front.metrics.generated_tokens > 5)
        server.engine.fail("rank 1 was killed by SIGKILL")
        answers = []
        for way in (stream, whole):
            response = http.client.HTTPResponse(way)
            response.begin()
            answers.append((response.status, response.read().decode()))
            way.close()
        (status, events), (code, body) = answers
        last = json.loads(events.removesuffix("\n\n").rpartition("data: ")[2])
        assert status == 200 and "SIGKILL" in last["error"]["message"] and last["error"]["type"] == "server_error"
        assert code == 500 and "SIGKILL" in json.loads(body)["error"]["message"]
        refused(server.post(COMPLETIONS, prompt="ab"), 503, None, "SIGKILL")
        refused(server.ask("GET", "/health"), 503, None, "SIGKILL")


def test_metrics_are_what_prometheus_reads(tmp_path):
    with serving(tmp_path) as server:
        server.post(COMPLETIONS, prompt="abc", max_tokens=5)
        server.post(COMPLETIONS, prompt="abc\0")
        server.post(COMPLETIONS)
        server.ask("GET", "/nowhere")
        _, text, headers = server.ask("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    told = {name: float(value) for name, value in rows.items()}
    expected = {
        'requests_total{path="/v1/completions",status="200"}': 2,
        'requests_total{path="/v1/completions",status="400"}': 1,
        'requests_total{path="other",status="404"}': 1,
        'sequences_finished_total{reason="length"}': 1,
        'sequences_finished_total{reason="stop"}': 1,
        "prompt_tokens_total": 7,
        "generated_tokens_total": 9,
        "sequences_running": 0,
        'pages{replica="0"}': 64,
        "time_to_first_token_seconds_count": 2,
        "time_per_token_seconds_count": 7,
        'time_per_token_seconds_bucket{le="+Inf"}': 7,
    }
    assert {name: told[f"shardwise_{name}"] for name in expected} == expected
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.partition("{")[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") in named
               for name in told)  # fmt: skip
