"""Files of a model's configuration from Hugging Face's hub."""

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from shardwise.errors import UserError
from shardwise.model.hub import endpoint, fetched_folder
from shardwise.model.precision import bits_in_name
from shardwise.small_files import MOST

SECONDS = 10
"""Longest wait for the hub, as huggingface_hub has it."""


def fetch(text: str) -> Path:
    """Fetch the `config.json` of an id, some kilobytes, and keep it. HF_TOKEN opens gated models.

    A quantized model's `hf_quant_config.json` comes with it where `config.json` does not say how it is quantized.
    Raises `UserError` in one line for ids that the hub does not have, or shows to nobody without a token, and where it
    cannot be reached.
    """
    folder = fetched_folder(text)
    config = _get(text, "config.json")
    if config is None:
        raise UserError(f"{endpoint()} has no {text} with a config.json")
    files: dict[str, Mapping[str, Any]] = {"config.json": config}
    if "quantization_config" not in config and bits_in_name(text) is not None:
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
