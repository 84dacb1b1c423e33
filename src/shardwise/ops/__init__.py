"""Forms of operations: how each kind of module computes, by mode and device. `table.py` chooses, nothing else does."""
