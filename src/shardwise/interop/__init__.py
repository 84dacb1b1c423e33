"""Other engines' configurations: `read` says which layout one of them is.

from shardwise.interop import read

reading = read(["ds_config.json"], ranks=64)
reading.layout, reading.facts, reading.notes
"""

from shardwise.interop.reading.reader import ENGINES, read
from shardwise.interop.reading.settings import Reading, ServerSettings

__all__ = ["ENGINES", "Reading", "ServerSettings", "read"]
