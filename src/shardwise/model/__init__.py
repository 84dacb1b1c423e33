"""Descriptions of models: their parameters, FLOPs. Imports nothing but the standard library."""

from shardwise.model.config import ModelConfig

__all__ = ["ModelConfig"]
