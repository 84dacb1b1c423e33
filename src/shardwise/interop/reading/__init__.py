"""Reading configurations of other engines: a file for each engine, `read` in front of them."""

from shardwise.interop.reading.reader import ENGINES, read
from shardwise.interop.reading.settings import Reading, ServerSettings

__all__ = ["ENGINES", "Reading", "ServerSettings", "read"]
