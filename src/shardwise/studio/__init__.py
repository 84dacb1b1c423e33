"""The page: what the rest of shardwise computes, drawn in a browser. A small local server, and static ES modules.

`data/` has one module a view, pure functions from a state (the words of a URL) to columns; `static/` draws them.
"""
