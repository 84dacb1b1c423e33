"""What `transformers` reads of tensors' values to choose a mask, for traces, which have no values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_LOOKS = "find_packed_sequence_indices"


@contextmanager
def usual_masks(example: Any) -> Iterator[None]:
    """While inputs have no values, positions that the example does not give count up, so that no row is packed.

    `transformers.masking_utils.find_packed_sequence_indices` looks for packed sequences in the positions, and on fake
    tensors takes all rows as packed, which has a mask where a step has none.
    """
    masking = sys.modules.get("transformers.masking_utils")
    packs = isinstance(example, Mapping) and example.get("position_ids") is not None
    if packs or not hasattr(masking, _LOOKS):
        yield
        return
    before = getattr(masking, _LOOKS)
    setattr(masking, _LOOKS, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, _LOOKS, before)
