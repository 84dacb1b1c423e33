"""Pipelines whose arithmetic is emulated: real processes, messages and memory, and a timed wait for each computation.

So the bubbles of eight stages can be measured on two cores. `job` starts the ranks and needs no torch; each of them is
`rank`, which hands the schedule and a `TimedWorker` to the very executor that trains.
"""
