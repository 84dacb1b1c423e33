"""Certificates: whether an engine computes the gradients of the plain model under its layouts, by numbers."""
