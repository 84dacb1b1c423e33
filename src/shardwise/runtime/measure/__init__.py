"""Measurements of a rank and its machine: memory, the timeline of a step, samples for `calibrate device`."""
