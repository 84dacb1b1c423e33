"""ZeRO: flat buffers, gradient accumulation and the sharded optimizer, every stage by one engine."""
