"""Text in, batches of token windows out: sources, tokenizer, the memory-mapped corpus, the order of samples.

The names below are imported when they are first used, so that importing the room costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.data.corpus import Corpus, prepare
    from shardwise.data.sampler import Sampler
    from shardwise.data.sources import Source, open_source

__all__ = ["Corpus", "Sampler", "Source", "open_source", "prepare"]

_HOMES = {"Corpus": "corpus", "prepare": "corpus", "Sampler": "sampler", "Source": "sources", "open_source": "sources"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
