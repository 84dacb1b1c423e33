"""Pipeline parallelism: stages, the executor of schedules, and one training step."""
