"""Replicas that agree otherwise than in lockstep: parameter servers and their workers."""
