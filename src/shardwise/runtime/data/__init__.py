"""Data parallelism: which sequences a rank trains on."""
