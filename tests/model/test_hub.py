"""Names of the hub, online: against a server on this machine."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from harness.cases import from_table
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.model.catalog import resolve
from shardwise.model.parameters import count

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
FILES = {
    "/someone/small/resolve/main/config.json": json.dumps(CONFIG),
    "/someone/small-FP8/resolve/main/config.json": json.dumps(CONFIG),
    "/someone/small-FP8/resolve/main/hf_quant_config.json": json.dumps({"quantization": {"quant_algo": "FP8"}}),
    "/someone/broken/resolve/main/config.json": "{",
    "/someone/list/resolve/main/config.json": "[]",
}


class Hub(BaseHTTPRequestHandler):
    """Files of a hub: a gated model needs a token, a renamed one redirects."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        Hub.asked.append((self.path, self.headers.get("Authorization")))
        path = self.path.removeprefix("/moved")
        if "gated" in path and self.headers.get("Authorization") != "Bearer secret":
            return self.answer(401, "")
        if "renamed" in path:
            self.send_response(307)
            self.send_header("Location", "/moved" + path.replace("renamed-gated", "gated"))
            return self.end_headers()
        found = FILES.get(path.replace("gated", "small"))
        return self.answer(200 if found else 404, found or "")

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Hub.asked = []
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_unknown_id_is_fetched_once_and_kept(hub, monkeypatch):
    model = resolve("someone/small")
    assert (model.name, model.hidden, model.layers) == ("someone/small", 64, 2)
    assert Hub.asked == [("/someone/small/resolve/main/config.json", None)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert count(resolve("someone/small")) == count(model)
    assert len(Hub.asked) == 1


def test_offline_never_connects(hub, capsys):
    assert main(["list", "models", "someone/small", "--offline"]) == 2
    assert "someone/small" in capsys.readouterr().err
    assert Hub.asked == []
    with pytest.raises(UserError, match="offline"):
        resolve("someone/small")  # the flag holds for the process


def test_models_that_are_known_here_are_not_asked_for(hub):
    for name in ("openai/gpt-oss-20b", "Qwen/Qwen2.5-32B", "llama-3-8b"):
        resolve(name)
    assert Hub.asked == []


def test_a_quantizer_beside_the_configuration_is_fetched_too(hub):
    model = resolve("someone/small-FP8")
    assert model.counted is not None and model.counted.stored == "fp8"


def test_a_gated_model_needs_a_token_which_a_redirect_on_the_same_host_keeps(hub, monkeypatch):
    with pytest.raises(UserError, match=r"HTTP 401.*HF_TOKEN"):
        resolve("someone/gated")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert resolve("someone/gated").hidden == 64
    assert resolve("someone/renamed-gated").hidden == 64


def test_a_redirect_to_another_host_does_not_get_the_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    port = hub.server_port
    monkeypatch.setattr(Hub, "do_GET", elsewhere(Hub.do_GET, f"http://localhost:{port}"))
    assert resolve("someone/small").hidden == 64
    assert [token for _, token in Hub.asked] == [None]


def elsewhere(answer, host):
    """`do_GET` of a hub whose files are on another host."""

    def do_get(self) -> None:
        if self.headers["Host"].startswith("localhost"):
            return answer(self)
        self.send_response(302)
        self.send_header("Location", host + self.path)
        return self.end_headers()

    return do_get


@from_table
def test_what_the_hub_does_not_have_is_one_line(hub, name, match):
    with pytest.raises(UserError, match=match) as error:
        resolve(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "file:///etc", "http://no host"])
def test_no_network_is_one_line(hub, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UserError, match="no model 'someone/small'") as error:
        resolve("someone/small")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_emitted_commands_carry_the_hubs_id(hub, capsys):
    words = "plan someone/small --cluster 1xH100 --serve --prompt 64 --output 32 --concurrency 2 --emit vllm"
    assert main(words.split()) == 0
    assert "vllm serve someone/small" in capsys.readouterr().out
    assert main(words.replace("someone/small", "gpt-oss-20b").split()) == 0
    assert "vllm serve openai/gpt-oss-20b" in capsys.readouterr().out


def test_servers_load_the_files_of_an_id_as_they_are_stored():
    text = "deepseek-ai/DeepSeek-V3"
    assert resolve(text).counted is None
    served = resolve(text, fetch=False, stored=True)
    assert served.name == text and served.counted and served.counted.stored.startswith("fp8")
    assert resolve("Qwen/Qwen3-8B", fetch=False, stored=True) == resolve("Qwen/Qwen3-8B")
