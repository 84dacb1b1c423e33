"""Models by their ids on Hugging Face's hub, owner/name: the dated list, and the local cache."""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

OFFLINE = "HF_HUB_OFFLINE"
"""Variable that forbids connections, here as for huggingface_hub."""


def is_hub_id(text: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) is not None


@cache
def hub_models() -> dict[str, Any]:
    """Popular models, as of the date in `hub.json`: id -> the shapes in its `config.json`, another id, or fields beside
    those of another id (`base`)."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("hub.json").read_text(encoding="utf-8"))
    return found["models"]


def listed(text: str) -> tuple[str, dict[str, Any]] | None:
    """(id, shapes) of a model of the list, whatever the case of its id."""
    name = {name.lower(): name for name in hub_models()}.get(text.strip().lower())
    if name is None:
        return None
    config = hub_models()[name]
    config = {"base": config} if isinstance(config, str) else dict(config)
    while base := config.pop("base", None):
        other = hub_models()[base]
        config = {**({"base": other} if isinstance(other, str) else other), **config}
    return name, config


_ENDING = r"(?:-(?:base|chat|hf|instruct|it|pt|v\d[\d.]*|\d{4}))*"
"""Ends of names that change no shape."""


def full_id(text: str) -> str:
    """The id in the list of a name without its owner, and mostly without its ending, such as gemma-3-27b; the name
    itself where there is none, or several of other shapes."""
    if "/" in text:
        return text
    fitting = re.compile(re.escape(text.strip()) + _ENDING, re.IGNORECASE)
    ids = [name for name in hub_models() if fitting.fullmatch(name.partition("/")[2])]
    least = min((name.count("-") for name in ids), default=0)
    shapes = {name: (listed(name) or ("", {}))[1] for name in ids if name.count("-") == least}
    first = next(iter(shapes), text)
    return first if all(one == shapes[first] for one in shapes.values()) else text


def cached(text: str) -> Path | None:
    """The newest `config.json` of an id in the hub's local cache, else the one that `hub_fetch` has left."""
    if not is_hub_id(text):
        return None
    home = os.environ.get("HF_HOME") or _caches() / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    snapshots = Path(cache, f"models--{text.replace('/', '--')}", "snapshots")
    newest = max(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
    fetched = fetched_folder(text) / "config.json"
    return newest or (fetched if fetched.is_file() else None)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or _caches(), "shardwise")


def _caches() -> Path:
    """The user's folder of caches. A user without a home, as in some containers, has one for temporary files."""
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        from tempfile import gettempdir

        return Path(gettempdir(), ".cache")


def fetched_folder(text: str) -> Path:
    """Where `hub_fetch` keeps the files of an id."""
    where = re.sub(r"\W+", "-", endpoint().partition("://")[2])
    return cache_folder() / "hub" / where / text.replace("/", "--")


def endpoint() -> str:
    """Address of the hub: HF_ENDPOINT, else https://huggingface.co."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline() -> bool:
    return os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")
