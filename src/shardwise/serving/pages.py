"""`Pages`: who has which pages of the cache, what of them is known to hold which tokens, and which go first.

Plain bookkeeping, the same on every rank of a replica: a page is a number. Full pages whose tokens are known are found
again by a hash of all tokens up to their end; those that nobody uses any more stay until their place is needed, the
longest unused going first. A sequence's pages follow each other where that can be had, because attention then reads
them where they are.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes
START: Key = b""


def page_key(before: Key, tokens: Sequence[int]) -> Key:
    """The key of a page: of its tokens and all before them. before: the key of the page before, or `START`."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Pages:
    """`count` pages of `size` tokens. reuse: whether known pages may be found again."""

    def __init__(self, count: int, size: int, reuse: bool = True) -> None:
        self.count, self.size, self.reuse = count, size, reuse
        self._users = [0] * count
        self._keys: dict[int, Key] = {}
        self._known: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Known pages that nobody uses, the longest unused first."""
        self._empty = set(range(count))
        self._hopes = [0] * count
        """Page -> the owner that would like to grow into it; 0 for nobody."""

    @property
    def free(self) -> int:
        """Pages that can be had: empty ones, and known ones that nobody uses."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - self.free

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The known pages of the longest prefix of `keys`. They are nobody's until they are shared."""
        found = []
        for key in keys if self.reuse else ():
            if key not in self._known:
                break
            found.append(self._known[key])
        return found

    def idle(self, pages: Sequence[int]) -> int:
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)

    def take(self, owner: int, count: int, last: int | None = None, room: int = 0) -> list[int]:
        """`count` pages for `owner`, a number from 1; the caller has looked whether so many are free.

        last: the page after which they should come. room: so many pages will be wanted in the end.
        """
        assert count <= self.free
        near = self._run(owner, max(count, room)) if last is None else range(last + 1, self.count)
        found: list[int] = []
        for page in near:
            if len(found) == count or page not in self._empty:
                break
            found.append(page)
        self._empty.difference_update(found)
        found += self._spare(count - len(found))
        for page in found:
            self._users[page] = 1
        return found

    def _run(self, owner: int, length: int) -> range:
        start = 0
        for page in range(self.count):
            if page not in self._empty or self._hopes[page]:
                start = page + 1
            elif page + 1 - start == length:
                self._hopes[start : page + 1] = [owner] * length
                return range(start, page + 1)
        return range(0)

    def _spare(self, count: int) -> list[int]:
        """Empty pages, those that nobody hopes for first; then known ones, which are known no more."""
        if not count:
            return []
        found = sorted(self._empty, key=lambda page: (self._hopes[page] > 0, page))[:count]
        self._empty.difference_update(found)
        for _ in range(count - len(found)):
            page, _ = self._idle.popitem(last=False)
            del self._known[self._keys.pop(page)]
            found.append(page)
        return found

    def know(self, page: int, key: Key) -> None:
        """A page in use holds, from now on, the tokens of `key`; unless another one does already."""
        if self.reuse and key not in self._known and page not in self._keys:
            self._known[key], self._keys[page] = page, key

    def release(self, owner: int, pages: Sequence[int]) -> None:
        """One user less of each; `owner` hopes for nothing more."""
        for page in reversed(pages):  # the end of a prefix goes before its beginning
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._empty.add(page)
        if owner in self._hopes:
            self._hopes = [0 if hope == owner else hope for hope in self._hopes]
