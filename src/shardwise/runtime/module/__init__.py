"""A user's own module, split by the engine that trains the catalog's models."""
