"""Text in, batches of token windows out: sources, tokenizer, the memory-mapped corpus, the order of samples.

The names below are imported when they are first used, so that importing the room costs nothing.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.data.corpus import Corpus, prepare
    from shardwise.data.sampler import Sampler
    from shardwise.data.sources import Source, open_source

__all__ = ["Corpus", "Sampler", "Source", "open_source", "prepare"]

lazily(__name__)
