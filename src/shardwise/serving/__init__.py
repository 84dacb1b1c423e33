"""Generation split across devices: a cache of keys and values, batches that change every engine step, and a front
end."""
