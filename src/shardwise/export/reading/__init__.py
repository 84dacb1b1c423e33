"""Reading configurations of other engines: a file for each engine, `read` in front of them."""

from shardwise.export.reading.found import Reading, Served
from shardwise.export.reading.reader import ENGINES, read

__all__ = ["ENGINES", "Reading", "Served", "read"]
