"""CUDA forms."""
