# mypy: ignore-errors
"""Triton kernels of decode steps. torch brings Triton with it for CUDA; nothing else may import this module first.

A decode step reads every weight once, and all else should take no time: products with one row add norm, gate and
residual to the reading of their matrix, and attention reads pages where they are (split over keys, Dao et al. 2023).
Sums are in fp32.

Kernels of a step with one row have programmatic dependent launch (PDL): the programs of the next one begin before this
one ends, and wait for its end where they need it (Llama-3-8B in int8 on an H100: 2.95 ms a step in place of 3.21). With
several rows a step was slower (8 rows: 4.9 ms at best in place of 4.35; the cause was not looked for). PTX: whether the
device runs PTX.

Annotations are objects here, not strings: Triton looks for `tl.constexpr` among them.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton: PDL is never set
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def _gated(gate, up, GATE: tl.constexpr):
    """GATE: 1 for silu(gate) up, 2 for gelu(gate) up by its tanh form."""
    if GATE == 1:
        return gate * tl.sigmoid(gate) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner) * up  # 1 + tanh(z) = 2 sigmoid(2 z)


@triton.jit
def _begin(PDL: tl.constexpr):
    """Wait for the kernel before, and let the next one begin."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _widened(w, PTX: tl.constexpr):
    """Numbers as fp32. A device adds faster than it converts int8 (CUDA C++ Programming Guide, throughput of arithmetic
    instructions), so four bytes become the last bytes of four numbers 2^23 + 128 + w, less 2^23 + 128."""
    if PTX and w.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a, b, c, d;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 a, t, 0x4B000000, 0x7650;
            prmt.b32 b, t, 0x4B000000, 0x7651;
            prmt.b32 c, t, 0x4B000000, 0x7652;
            prmt.b32 d, t, 0x4B000000, 0x7653;
            sub.f32 $0, a, 0f4B000080;
            sub.f32 $1, b, 0f4B000080;
            sub.f32 $2, c, 0f4B000080;
            sub.f32 $3, d, 0f4B000080;
            }""",
            "=f,=f,=f,=f,r", [w], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return w.to(tl.float32)


@triton.jit
def _add_columns(w, u, x, gain, at, there, sums, ups, squares, NORM: tl.constexpr, GATE: tl.constexpr,
                 PTX: tl.constexpr):  # fmt: skip
    """The sums with the products of some columns added. w, u: [GROUPS, ROWS, 8]; at: [GROUPS, 1, 8], of x and gain."""
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if NORM:
        squares += tl.sum(v * v, 2)
        v *= tl.load(gain + at, mask=there, other=0.0).to(tl.float32)
    sums += tl.sum(_widened(w, PTX) * v, 2)
    if GATE:
        ups += tl.sum(_widened(u, PTX) * v, 2)
    return sums, ups, squares


@triton.jit
def one_row(x, gain, weight, scale, bias, residual, out, outputs, inputs, eps,
            NORM: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr, GATE: tl.constexpr,
            EVEN: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    """out [outputs] = W x, with x [inputs] normed before and the rest after it. weight: [outputs, inputs], of gated
    maps [2 outputs, inputs]. The norm's factor is applied to the sums, so that nothing waits for it.

    A thread has eight columns that follow each other of all rows: x and W are then spread over threads in one way, and
    nothing passes through shared memory but the last sums. With PDL the first columns of W are read before the kernel
    that computes x has ended: what wrote W must have ended before that one began.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    GROUPS: tl.constexpr = COLUMNS // 8
    columns = tl.arange(0, GROUPS)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    matrix = weight + rows.to(tl.int64)[None, :, None] * inputs
    second = matrix + outputs.to(tl.int64) * inputs
    kept = rows < outputs
    there = (columns < inputs) | EVEN
    inside = (kept[None, :, None] & there) | EVEN
    if PDL:
        gdc_launch_dependents()
    w = tl.load(matrix + columns, mask=inside, other=0, eviction_policy="evict_first")
    u = w
    if GATE:
        u = tl.load(second + columns, mask=inside, other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    sums = tl.zeros([GROUPS, ROWS], dtype=tl.float32)
    ups = tl.zeros([GROUPS, ROWS], dtype=tl.float32)
    squares = tl.zeros([GROUPS, 1], dtype=tl.float32)
    sums, ups, squares = _add_columns(w, u, x, gain, columns, there, sums, ups, squares, NORM, GATE, PTX)
    for start in range(COLUMNS, inputs, COLUMNS):
        at = start + columns
        there = (at < inputs) | EVEN
        inside = (kept[None, :, None] & there) | EVEN
        w = tl.load(matrix + at, mask=inside, other=0, eviction_policy="evict_first")
        u = w
        if GATE:
            u = tl.load(second + at, mask=inside, other=0, eviction_policy="evict_first")
        sums, ups, squares = _add_columns(w, u, x, gain, at, there, sums, ups, squares, NORM, GATE, PTX)
    y = tl.sum(sums, 0)
    z = tl.sum(ups, 0)
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
def few_rows(x, weight, scale, bias, residual, out, count, outputs, inputs, share,
             SCALED: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr,
             BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out [count, outputs] = x W^T + residual. x: [count, inputs]; BATCH: count, padded to a tile.

    The second program of each tile, if there is one, has the next `share` of the inputs, and so on; out is then [parts,
    count, outputs], for `joined`.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    lanes = tl.arange(0, BATCH)
    here = lanes < count
    kept = rows < outputs
    matrix = weight + rows.to(tl.int64)[:, None] * inputs
    sums = tl.zeros([ROWS, BATCH], dtype=tl.float32)
    first = tl.program_id(1) * share
    for start in tl.range(first, tl.minimum(first + share, inputs), COLUMNS, num_stages=STAGES):
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
    places += tl.program_id(1) * count * outputs
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["count"])
def joined(parts, scale, bias, residual, out, count, outputs, SCALED: tl.constexpr, BIASED: tl.constexpr,
           ADDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out [count, outputs]: the sum of parts [PARTS, count, outputs], with what follows a product."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < outputs
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(parts + (part * count + row) * outputs + at, mask=there, other=0.0)
    if SCALED:
        y *= tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        y += tl.load(residual + row * outputs + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + at, y.to(out.dtype.element_ty), mask=there)


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
                   PADDED: tl.constexpr, NORM: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Queries and keys of one token per row, normed and rotated; keys and values go to the cache.

    heads: [B, HEADS + 2 KV, WIDTH]; cos, sin: [B, HALF], of the pairs (i, i + HALF); queries: [B, HEADS, WIDTH]; cache:
    [2, KV, places, WIDTH]; slots: [B]. The first token of a page of SIZE slots clears the others.
    """
    _begin(PDL)
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
                SPLITS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Attention of the queries that share a key head to one of SPLITS parts of a sequence's keys.

    queries: [B, HEADS, WIDTH]; cache: [2, KV, places, WIDTH]; table: [B, columns]; lengths: [B]; partial: fp32
    [B, HEADS, SPLITS, WIDTH], not yet divided by totals [B, HEADS, SPLITS], of exponentials of scores less tops.
    """
    _begin(PDL)
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
def attend_join(partial, tops, totals, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """The parts of one head of one sequence together. out: [B, HEADS, WIDTH]."""
    _begin(PDL)
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
