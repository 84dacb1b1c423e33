# mypy: ignore-errors
"""Triton kernels of decode steps. torch brings Triton with it for CUDA; nothing else may import this module first.

A decode step reads every weight once, and all else should take no time: products with one row add norm, gate and
residual to the reading of their matrix, and attention reads pages where they are (split over keys, Dao et al. 2023).
Sums are in fp32.

Annotations are objects here, not strings: Triton looks for `tl.constexpr` among them.
"""

import triton
import triton.language as tl


@triton.jit
def _gated(gate, up, GATE: tl.constexpr):
    """GATE: 1 for silu(gate) up, 2 for gelu(gate) up by its tanh form."""
    if GATE == 1:
        return gate * tl.sigmoid(gate) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner) * up  # 1 + tanh(z) = 2 sigmoid(2 z)


@triton.jit
def one_row(x, gain, weight, scale, bias, residual, out, outputs, inputs, eps,
            NORM: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr, GATE: tl.constexpr,
            EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out [outputs] = W x, with x [inputs] normed before and the rest after it. weight: [outputs, inputs], of gated
    maps [2 outputs, inputs]. The norm's factor is applied to the sums, so that nothing waits for it."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    matrix = weight + rows.to(tl.int64)[:, None] * inputs
    second = matrix + outputs.to(tl.int64) * inputs
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([1, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
        at = start + columns
        there = (at < inputs) | EVEN
        inside = ((rows < outputs)[:, None] & there) | EVEN
        v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
            v *= tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
        w = tl.load(matrix + at, mask=inside, other=0.0, eviction_policy="evict_first")
        sums += w.to(tl.float32) * v
        if GATE:
            u = tl.load(second + at, mask=inside, other=0.0, eviction_policy="evict_first")
            ups += u.to(tl.float32) * v
    y = tl.sum(sums, 1)
    z = tl.sum(ups, 1)
    kept = rows < outputs
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares) / inputs + eps)
        y *= factor
        z *= factor
    if SCALED:
        y *= tl.load(scale + rows, mask=kept, other=0.0).to(tl.float32)
        if GATE:
            z *= tl.load(scale + outputs + rows, mask=kept, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias + rows, mask=kept, other=0.0).to(tl.float32)
        if GATE:
            z += tl.load(bias + outputs + rows, mask=kept, other=0.0).to(tl.float32)
    if GATE:
        y = _gated(y, z, GATE)
    if ADDS:
        y += tl.load(residual + rows, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["count"])
def few_rows(x, weight, scale, bias, residual, out, count, outputs, inputs,
             SCALED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr,
             BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out [count, outputs] = x W^T + residual. x: [count, inputs]; BATCH: count, padded to a tile."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    lanes = tl.arange(0, BATCH)
    here = lanes < count
    kept = rows < outputs
    matrix = weight + rows.to(tl.int64)[:, None] * inputs
    sums = tl.zeros([ROWS, BATCH], dtype=tl.float32)
    for start in tl.range(0, inputs, COLUMNS, num_stages=STAGES):
        at = start + columns
        there = (at < inputs) | EVEN
        w = tl.load(matrix + at[None, :], mask=(kept[:, None] & there[None, :]) | EVEN, other=0.0,
                    eviction_policy="evict_first")  # fmt: skip
        v = tl.load(x + lanes[None, :] * inputs + at[:, None], mask=here[None, :] & there[:, None], other=0.0)
        sums = tl.dot(w.to(v.dtype), v, sums, input_precision="ieee")
    if SCALED:
        sums *= tl.load(scale + rows, mask=kept, other=0.0).to(tl.float32)[:, None]
    if BIASED:
        sums += tl.load(bias + rows, mask=kept, other=0.0).to(tl.float32)[:, None]
    places = lanes[None, :] * outputs + rows[:, None]
    stored = here[None, :] & kept[:, None]
    if ADDS:
        sums += tl.load(residual + places, mask=stored, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=stored)


@triton.jit
def normed(x, gain, out, width, eps, PADDED: tl.constexpr):
    """RMSNorm of rows [B, width], one program each."""
    row = tl.program_id(0)
    at = tl.arange(0, PADDED)
    there = at < width
    v = tl.load(x + row * width + at, mask=there, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(v * v) / width + eps)
    g = tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (v * factor * g).to(out.dtype.element_ty), mask=there)


@triton.jit
def gated(x, out, width, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """act(gate) up of rows [gate | up] [B, 2 width]: [B, width]."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(x + row * 2 * width + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, _gated(gate, up, GATE).to(out.dtype.element_ty), mask=there)


@triton.jit
def turn_and_store(heads, cos, sin, q_gain, k_gain, queries, cache, slots, places, eps,
                   HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
                   PADDED: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Queries and keys of one token per row, normed and rotated; keys and values go to the cache.

    heads: [B, HEADS + 2 KV, WIDTH]; cos, sin: [B, HALF], of the pairs (i, i + HALF); queries: [B, HEADS, WIDTH]; cache:
    [2, KV, places, WIDTH]; slots: [B]. The first token of a page of SIZE slots clears the others.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, PADDED)
    there = at < WIDTH
    source = heads + (row * (HEADS + 2 * KV) + head) * WIDTH
    v = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
    if head < HEADS + KV:
        other = tl.where(at < HALF, at + HALF, at - HALF)
        turned = at < 2 * HALF
        partner = tl.load(source + other, mask=turned, other=0.0).to(tl.float32)
        if NORM:
            factor = 1.0 / tl.sqrt(tl.sum(v * v) / WIDTH + eps)
            is_query = head < HEADS
            own = tl.load(q_gain + at, mask=there & is_query, other=0.0).to(tl.float32)
            own += tl.load(k_gain + at, mask=there & (head >= HEADS), other=0.0).to(tl.float32)
            theirs = tl.load(q_gain + other, mask=turned & is_query, other=0.0).to(tl.float32)
            theirs += tl.load(k_gain + other, mask=turned & (head >= HEADS), other=0.0).to(tl.float32)
            v = v * factor * own
            partner = partner * factor * theirs
        if HALF:
            angle = tl.where(at < HALF, at, at - HALF)
            c = tl.load(cos + row * HALF + angle, mask=turned, other=1.0).to(tl.float32)
            s = tl.load(sin + row * HALF + angle, mask=turned, other=0.0).to(tl.float32)
            v = v * c + tl.where(at < HALF, -partner, partner) * s
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * WIDTH + at, v.to(queries.dtype.element_ty), mask=there)
    else:
        slot = tl.load(slots + row)
        target = cache + ((head - HEADS).to(tl.int64) * places + slot) * WIDTH
        tl.store(target + at, v.to(cache.dtype.element_ty), mask=there)
        if slot % SIZE == 0:
            for index in range(1, SIZE):
                tl.store(target + index * WIDTH + at, tl.zeros([PADDED], cache.dtype.element_ty), mask=there)


@triton.jit
def attend_part(queries, cache, table, lengths, partial, tops, totals, scale, softcap, places, columns,
                HEADS: tl.constexpr, KV: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
                PADDED: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
                SPLITS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Attention of the queries that share a key head to one of SPLITS parts of a sequence's keys.

    queries: [B, HEADS, WIDTH]; cache: [2, KV, places, WIDTH]; table: [B, columns]; lengths: [B]; partial: fp32
    [B, HEADS, SPLITS, WIDTH], not yet divided by totals [B, HEADS, SPLITS], of exponentials of scores less tops.
    """
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    length = tl.load(lengths + row).to(tl.int32)
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), KEYS) * KEYS
    start = first + split * share
    stop = tl.minimum(start + share, length)
    lanes = tl.arange(0, LANES)
    at = tl.arange(0, PADDED)
    there = at < WIDTH
    own = lanes < GROUP
    head = kv * GROUP + lanes
    q = tl.load(queries + (row * HEADS + head[:, None]) * WIDTH + at[None, :], mask=own[:, None] & there[None, :],
                other=0.0)  # fmt: skip
    keys = cache + kv.to(tl.int64) * places * WIDTH
    values = cache + (KV + kv).to(tl.int64) * places * WIDTH
    top = tl.full([LANES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    sums = tl.zeros([LANES, PADDED], dtype=tl.float32)
    for begin in range(start, stop, KEYS):
        place = begin + tl.arange(0, KEYS)
        seen = place < stop
        page = tl.load(table + row * columns + place // SIZE, mask=seen, other=0)
        slot = (page * SIZE + place % SIZE) * WIDTH
        k = tl.load(keys + slot[None, :] + at[:, None], mask=seen[None, :] & there[:, None], other=0.0)
        v = tl.load(values + slot[:, None] + at[None, :], mask=seen[:, None] & there[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        kept = tl.exp(top - highest)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = highest
    target = (row * HEADS + head) * SPLITS + split
    tl.store(tops + target, top, mask=own)
    tl.store(totals + target, total, mask=own)
    tl.store(partial + target[:, None] * WIDTH + at[None, :], sums, mask=own[:, None] & there[None, :])


@triton.jit
def attend_join(partial, tops, totals, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one head of one sequence together. out: [B, HEADS, WIDTH]."""
    head = tl.program_id(0)
    at = tl.arange(0, PADDED)
    there = at < WIDTH
    splits = tl.arange(0, SPLITS)
    top = tl.load(tops + head * SPLITS + splits)
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weights * tl.load(totals + head * SPLITS + splits), 0)
    parts = tl.load(partial + (head * SPLITS + splits[:, None]) * WIDTH + at[None, :],
                    mask=there[None, :] & (weights > 0)[:, None], other=0.0)  # fmt: skip
    y = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + head * WIDTH + at, y.to(out.dtype.element_ty), mask=there)
