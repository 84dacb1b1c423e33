"""Test support: a pool of ranks, the one-device reference, and the space from which layouts are generated."""
