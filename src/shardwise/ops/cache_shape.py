"""Numbers that the cache of generation keeps for a token. Without torch: predictions ask, too."""

from typing import NamedTuple


class CacheShape(NamedTuple):
    """A token in one block's cache on one rank."""

    planes: int
    """2: keys, and values; 1: keys, whose first numbers are the values (latent attention)."""
    heads: int
    """Heads of keys."""
    width: int
    """Numbers of a head of keys, and of queries."""
    values: int
    """Numbers of a head of values, and of what attention returns for a head of queries."""

    @property
    def rows(self) -> int:
        """Vectors of `width` numbers."""
        return self.planes * self.heads

    @property
    def numbers(self) -> int:
        return self.rows * self.width
