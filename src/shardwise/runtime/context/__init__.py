"""Context parallelism: attention over sequences that are cut over ranks. `layout/context.py` has the cut."""
