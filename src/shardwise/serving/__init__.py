"""Generation split across devices: a cache of keys and values, batches that change every turn, and a front end."""
