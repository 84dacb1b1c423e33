"""Shapes of any language model's tensors, as formulas of its configuration."""
