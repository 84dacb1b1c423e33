"""Other engines' configurations: `read` says which layout one of them is, `write` makes one from a layout.

from shardwise.interop import WriteRequest, read, write

reading = read(["ds_config.json"], ranks=64)
reading.layout, reading.facts, reading.notes
write("deepspeed", WriteRequest(model, layout, workload)).text
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.interop.reading.reader import ENGINES, read
    from shardwise.interop.reading.settings import Reading, ServerSettings
    from shardwise.interop.spec import EngineSpec
    from shardwise.interop.writing.request import EngineFile, WriteRequest
    from shardwise.interop.writing.writer import WRITERS, nearest_layout, write

__all__ = [
    "ENGINES", "WRITERS", "EngineFile", "EngineSpec", "Reading", "ServerSettings", "WriteRequest", "nearest_layout",
    "read", "write",
]  # fmt: skip

lazily(__name__)
