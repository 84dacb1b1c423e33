"""Models by their ids on Hugging Face's hub, owner/name: the dated list, the local cache, and the hub itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shardwise.errors import UserError
from shardwise.small_files import MOST

SECONDS = 10
"""Longest wait for the hub, as huggingface_hub has it."""
OFFLINE = "HF_HUB_OFFLINE"
"""Variable that forbids connections, here as for huggingface_hub."""
_QUANTIZED = re.compile(r"fp4|fp8|int4|int8|w4a|w8a", re.IGNORECASE)


def is_hub_id(text: str) -> bool:
    """Whether a text has the form owner/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) is not None


@cache
def hub_models() -> dict[str, Any]:
    """Popular models, as of the date in `hub.json`: id -> the shapes in its `config.json`, or another id."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("hub.json").read_text(encoding="utf-8"))
    return found["models"]


def listed(text: str) -> tuple[str, dict[str, Any]] | None:
    """(id, shapes) of a model of the list, whatever the case of its id."""
    name = {name.lower(): name for name in hub_models()}.get(text.strip().lower())
    if name is None:
        return None
    config = hub_models()[name]
    return name, hub_models()[config] if isinstance(config, str) else config


def cached(text: str) -> Path | None:
    """The newest `config.json` of an id in the hub's local cache, else the one that `fetch` has left."""
    if not is_hub_id(text):
        return None
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    snapshots = Path(cache, f"models--{text.replace('/', '--')}", "snapshots")
    newest = max(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
    fetched = _folder(text) / "config.json"
    return newest or (fetched if fetched.is_file() else None)


def cache_folder() -> Path:
    """Where files about models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardwise")


def _folder(text: str) -> Path:
    where = urlsplit(endpoint()).netloc.replace(":", "-")
    return cache_folder() / "hub" / where / text.replace("/", "--")


def endpoint() -> str:
    """Address of the hub: HF_ENDPOINT, else https://huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline() -> bool:
    """Whether connections are forbidden."""
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def fetch(text: str) -> Path:
    """Fetch the `config.json` of an id, some kilobytes, and keep it. HF_TOKEN opens gated models.

    A quantized model's `hf_quant_config.json` comes with it where `config.json` does not say how it is quantized.
    Raises `UserError` in one line for ids that the hub does not have, or shows to nobody without a token, and where it
    cannot be reached.
    """
    folder = _folder(text)
    config = _get(text, "config.json")
    if config is None:
        raise UserError(f"{endpoint()} has no {text} with a config.json")
    files: dict[str, Mapping[str, Any]] = {"config.json": config}
    if "quantization_config" not in config and _QUANTIZED.search(text):
        beside = _get(text, "hf_quant_config.json")
        files |= {"hf_quant_config.json": beside} if beside else {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in reversed(files.items()):  # config.json last: `cached` looks for it
            (folder / f"{name}.new").write_text(json.dumps(data), encoding="utf-8")
            (folder / f"{name}.new").replace(folder / name)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder / "config.json"


class _SameHost(HTTPRedirectHandler):
    """Redirects that take the token along on the same host only."""

    def redirect_request(self, request: Any, *args: Any) -> Any:
        again = super().redirect_request(request, *args)
        if again is not None and urlsplit(again.full_url)[:2] == urlsplit(request.full_url)[:2]:
            for name, value in request.unredirected_hdrs.items():
                again.add_unredirected_header(name, value)
        return again


def _get(text: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a model; None where the hub has none. Raises `UserError`."""
    base = endpoint()
    if urlsplit(base).scheme not in ("http", "https"):
        raise UserError(f"HF_ENDPOINT={base[:100]} is no http(s) address")
    request = Request(f"{base}/{text}/resolve/main/{name}", headers={"User-Agent": "shardwise"})
    if token := os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with build_opener(_SameHost).open(request, timeout=SECONDS) as answer:
            content = answer.read(MOST + 1)
        if len(content) > MOST:
            raise ValueError(f"more than {MOST:,} bytes")
        data = json.loads(content)
    except HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            need = "accept its license there" if os.environ.get("HF_TOKEN") else "set HF_TOKEN if it is gated"
            raise UserError(f"{base} shows no {text} to this user (HTTP {error.code}): {need}") from None
        raise UserError(f"{base} answered HTTP {error.code} for {text}") from None
    except (OSError, ValueError, RecursionError, HTTPException) as error:  # URLError and time-outs are OSErrors
        reason = str(getattr(error, "reason", error))[:120]
        kind = "is not valid JSON" if isinstance(error, json.JSONDecodeError) else "cannot be fetched"
        raise UserError(f"{name} of {text} {kind} from {base}: {reason}; give its config.json") from None
    if not isinstance(data, dict):
        raise UserError(f"{name} of {text} is JSON, but not an object")
    return data
