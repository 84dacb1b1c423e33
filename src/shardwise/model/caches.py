"""Cache of each layer of any model, and its bytes per token by kind of layer."""

from typing import Any

from shardwise.model.config import ModelConfig
from shardwise.model.counted import LayerCache

WIDTH = 2
"""Bytes of a number in 16 bits."""


def layer_caches(config: ModelConfig) -> tuple[LayerCache, ...]:
    """The cache of each layer for one sequence."""
    if config.counted:
        return config.counted.caches
    if config.latent_attention:
        return (LayerCache("latent", config.latent_attention.cached),) * config.layers
    windows = map(config.layer_window, range(config.layers))
    return tuple(LayerCache("window" if w else "full", 2 * config.kv_width, config.kv_heads, w) for w in windows)


def cache_json(config: ModelConfig) -> dict[str, Any]:
    """Bytes of the cache in 16 bits: per token, of that by kind of layer, and states per sequence, of any length."""
    kinds: dict[str, float] = {}
    for cache in layer_caches(config):
        if each := WIDTH * cache.numbers / cache.every + cache.extra:
            kinds[cache.kind] = kinds.get(cache.kind, 0) + each
    states = WIDTH * sum(cache.state for cache in layer_caches(config))
    return {
        "cache_bytes_per_token": sum(kinds.values()),
        "cache_bytes_per_token_by_kind": kinds,
        "window": max((cache.window for cache in layer_caches(config)), default=0),
        "state_bytes_per_sequence": states,
    }
