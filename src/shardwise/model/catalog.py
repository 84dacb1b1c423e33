"""Well-known models by name, each with the parameter count that its authors or its published weights state.

`catalog.json` has the fields of each that differ from the defaults of `ModelConfig`, or from those of the model that it
is `like`, and the paper or `config.json` that they and those after it come from. A test counts every entry's
parameters: an integer in `published_params` is exact, a float is a rounded figure.
"""

import json
import os
import re
from functools import cache
from pathlib import Path

from shardwise.errors import UserError, near_path, nearest
from shardwise.model.config import ModelConfig


def catalog() -> dict[str, ModelConfig]:
    """Name -> model, in reading order."""
    return dict(_catalog())


def get(name: str) -> ModelConfig:
    """The model of that name, in any case. Raises `UserError` with the nearest names when there is none."""
    found = _catalog().get(name.strip().lower())
    if found is None:
        raise UserError(f"no model {name!r} in the catalog; {_nearest(name)}")
    return found


def resolve(text: str, fetch: bool = True, stored: bool = False) -> ModelConfig:
    """A catalog name, else the path of a `config.json` or of its folder, else a name of Hugging Face's hub, of popular
    models without the owner, too.

    The catalog goes first; write `./gpt2` for a folder of that name. Of a hub's name, owner/name, the `config.json` in
    the local cache is read, else the second half is looked up in the catalog, else the list of popular models
    (`hub.json`) has it, else the hub is asked for its `config.json`: with `fetch`, and unless HF_HUB_OFFLINE is set.
    stored: the list goes before the catalog where it says in which precision an id's files are, as servers load them.
    Raises `UserError` when it is none of these.
    """
    text = text.strip()
    if found := _catalog().get(text.lower()):
        return found
    from shardwise.model import hub
    from shardwise.model.huggingface import read_fields, read_model

    # Path.exists raises for a name that is too long.
    if text and os.path.exists(text):  # noqa: PTH110
        return read_model(text)
    text = hub.full_id(text)
    if path := hub.cached(text):
        return read_model(path, text)
    entry = hub.listed(text)
    if entry and stored and "quantization_config" in entry[1]:
        return read_fields(entry[1], entry[0])
    if found := _of_hub(text):
        return found
    if entry:
        return read_fields(entry[1], entry[0])
    if text.startswith(("/", "./", "../", "~")) or text.endswith(".json"):
        raise UserError(f"no such file or folder: {text}{near_path(text)}")
    near = _nearest(text)
    if not hub.is_hub_id(text) or hub.offline() or not fetch:
        forbidden = f", which is not asked (--offline, {hub.OFFLINE})" if hub.is_hub_id(text) and fetch else ""
        raise UserError(
            f"no model {text!r}: neither in the catalog, nor a config.json or a folder with one, nor in the cache of "
            f"Hugging Face's hub{forbidden}; {near}"
        )
    from shardwise.model.hub_fetch import fetch as fetched

    try:
        return read_model(fetched(text), text)
    except UserError as error:
        hint = f"; {near}" if near.startswith("did you mean") else ""
        raise UserError(f"no model {text!r}: not known here, and {error}{hint}") from None


def _of_hub(text: str) -> ModelConfig | None:
    """The catalog's model whose name is a hub's, but for its owner and for what does not change a model's shape."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return None
    name = text.lower().partition("/")[2].removeprefix("meta-")
    first = r"|v0\.1" if name.startswith("mixtral") else ""  # of others a later version has another shape
    return _catalog().get(name) or _catalog().get(re.sub(rf"(-(instruct|chat|base|hf|it{first}))+$", "", name))


def hub_name(name: str) -> str:
    """The first id in the list of the hub whose shape is that of the catalog's model; the given name where none is."""
    from shardwise.model.hub import hub_models

    return next((text for text in hub_models() if (model := _of_hub(text)) and model.name == name), name)


@cache
def stored_as(name: str) -> str:
    """The format of the published files of a model of the catalog (`formats`), by the list of the hub; empty for 16
    bits, and where the list has no such model."""
    from shardwise.model.hub import listed
    from shardwise.model.huggingface import read_fields

    entry = listed(hub_name(name))
    if entry is None or "quantization_config" not in entry[1]:
        return ""
    counted = read_fields(entry[1], entry[0]).counted
    return counted.stored if counted else ""


def _nearest(name: str) -> str:
    # A name from a model hub, owner/name, is most often meant by its second half.
    from shardwise.model.hub import hub_models

    others = [other for other in hub_models() if other != name.strip()]
    within = sorted((other for other in others if len(name) > 2 and name.strip().lower() in other.lower()), key=len)
    listed = nearest(name.strip(), others, 2, cutoff=0.8) if "/" in name else within[:2]
    if not listed and not nearest(name.strip().lower(), _catalog(), 1, cutoff=0.8):
        halves = {other.partition("/")[2].lower(): other for other in others}
        listed = [halves[half] for half in nearest(name.strip().lower(), halves, 2, cutoff=0.8)]
    near = listed + nearest(name.strip().lower().rsplit("/", 1)[-1], _catalog(), 3, cutoff=0.5)
    otherwise = near_path(name).removeprefix("; ") or f"known are {', '.join(_catalog())}"
    return f"did you mean {' or '.join(near)}?" if near else otherwise


@cache
def _catalog() -> dict[str, ModelConfig]:
    rows = json.loads(Path(__file__).with_name("catalog.json").read_text(encoding="utf-8"))
    models: dict[str, ModelConfig] = {}
    for name, row in rows.items():
        like, _ = row.pop("like", None), row.pop("source", None)
        models[name] = ModelConfig.from_json((models[like].to_json() if like else {}) | row | {"name": name})
    return models
