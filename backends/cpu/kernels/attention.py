"""Causal attention over the paged cache: one procedure for prefill and decode.

The result of a query row depends on nothing but its query, its position and the cached keys and
values it may see. Positions are divided into fixed partitions of PARTITION. Within a partition a
row's softmax is computed in one piece (largest score, weights, weighted sum of values in order of
position); partitions are then folded together in order. Whether one task walks all partitions
(prefill, short contexts) or several tasks take some each and the last to finish folds them (long
contexts with few rows) changes who computes a part, never how.

A tile is up to TILE_ROWS rows: the query heads that share one KV head, for one or more queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import (
    CACHE_LINE,
    H_BLOCK_TABLES,
    H_QUERY_START,
    H_SEQ_LENS,
    H_SEQS,
    H_TABLE_BLOCKS,
    Kernel,
    arg_f32,
    arg_i64,
    claim,
    header,
    helper,
    kernel,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.kernels.attention_layout import STATE_BYTES, Span, Tile
from localllm.backends.cpu.kernels.attention_rows import attend_tile, load_queries
from localllm.backends.cpu.kernels.attention_tiles import (
    CALL_WORDS,
    LANES,
    PARTITION,
    PARTITION_BLOCKS,
    SCORE_BYTES,
    score_kernel,
    tile_shape,
    tile_vectors,
    value_kernel,
)
from localllm.backends.cpu.kernels.kv import VALUE_COLUMNS, value_columns
from localllm.backends.cpu.simd import scalar_load_i32

TILE_ROWS = 48  # rows of a tile, unless a KV head has more query heads than that
ITEMS_PER_THREAD = 8  # a step's work is divided into about as many pieces
MOST_PARTS_BYTES = 32 << 20
BLOCKS_BYTES = 2 * 2 * 8 * PARTITION_BLOCKS  # of a tile's two lists of blocks


@dataclass(frozen=True)
class AttendArgs(Arguments):
    """Words of `attend`. q is [T, heads * key_dim], out [T, heads * value_dim].

    `kv_store` has to have finished with the step's own keys and values. `cache` is the group's
    array plus `layer_offset`.
    """

    q: int
    q_stride: int
    out: int
    out_stride: int
    cache: int
    block_bytes: int  # group_block_bytes
    head_bytes: int
    group: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    sinks: int  # float32 [heads], or 0
    scratch: int  # aligned to 64
    scratch_bytes: int  # per thread: `scratch_bytes(...)`
    parts: int  # aligned to 64, `parts_bytes(...)` bytes for all threads; zero at first
    parts_bytes: int
    score_f16: int  # addresses of `tile_kernels`
    score_f32: int
    values_f16: int
    values_f32: int
    vector_f16: int
    vector_f32: int


def tile_kernels() -> dict[str, Kernel]:
    """What `attend` calls, by the fields of `AttendArgs` that take their addresses."""
    return {
        "score_f16": score_kernel("f16"),
        "score_f32": score_kernel("f32"),
        "values_f16": value_kernel("f16", True),
        "values_f32": value_kernel("f32", True),
        "vector_f16": value_kernel("f16", False),
        "vector_f32": value_kernel("f32", False),
    }


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows of a full tile: whole queries, each with the query heads of one KV head.

    Raises ValueError when KV heads do not share the query heads evenly.
    """
    per_query, rest = divmod(heads, kv_heads)
    if rest:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    return max(1, TILE_ROWS // per_query) * per_query


def scratch_bytes(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
    """Bytes that a thread needs; layers may share them."""
    part = 4 * value_columns(value_dim) + STATE_BYTES
    row = 4 * key_dim + SCORE_BYTES + 2 * part
    widened = 4 * LANES * tile_shape().vectors * max(key_dim, PARTITION)
    needed = BLOCKS_BYTES + 8 * CALL_WORDS + widened + row * tile_rows(heads, kv_heads)
    return -(-needed // CACHE_LINE) * CACHE_LINE


def parts_bytes(nthreads: int, context: int, heads: int, kv_heads: int, value_dim: int) -> int:
    """Bytes for parts that several threads compute; layers may share them, the largest serves.

    What does not fit is computed by one thread. Only the memory that long contexts need is touched.
    """
    rows = ITEMS_PER_THREAD * nthreads * (heads // kv_heads) * -(-context // PARTITION)
    part = 4 * value_columns(value_dim) + STATE_BYTES
    slots = min(rows * part, MOST_PARTS_BYTES)
    return ITEMS_PER_THREAD * nthreads * CACHE_LINE + slots


(
    _Q,
    _Q_STRIDE,
    _OUT,
    _OUT_STRIDE,
    _CACHE,
    _BLOCK_BYTES,
    _HEAD_BYTES,
    _GROUP,
    _HEADS,
    _KV_HEADS,
    _KEY_DIM,
    _VALUE_DIM,
    _SCALE,
    _WINDOW,
    _SOFTCAP,
    _SINKS,
    _SCRATCH,
    _SCRATCH_BYTES,
    _PARTS,
    _PARTS_BYTES,
    _CODE,
) = range(FIRST_WORD, FIRST_WORD + 21)
_NO_WINDOW = _MOST_TILES = 1 << 40


@kernel
def attend(args: int, tid: int, nthreads: int) -> None:
    """out = softmax(scale * q @ keys) @ values for every query row."""
    most_pieces = ITEMS_PER_THREAD * nthreads
    kv_heads, parts = arg_i64(args, _KV_HEADS), arg_i64(args, _PARTS)
    per_piece = max(1, -(-_count_parts(args) * kv_heads // most_pieces))
    item, first_item = claim(args, 1), 0
    counters, used = 0, most_pieces * CACHE_LINE
    for seq in range(arg_i64(header(args), H_SEQS)):
        for number in range(_MOST_TILES):
            span = _span(args, seq, number)
            if span.queries <= 0:
                break
            n_parts = span.end - span.first
            head_bytes = n_parts * span.queries * span.rows_per_query * _part_bytes(args)
            pieces = -(-n_parts // per_piece)
            if pieces == 1 or used + kv_heads * head_bytes > arg_i64(args, _PARTS_BYTES):
                pieces, head_bytes = 1, 0
            while item < first_item + kv_heads * pieces:
                kv_head, piece = divmod(item - first_item, pieces)
                tile = _tile(args, tid, span, kv_head)
                skip, count, shared = 0, n_parts, 0
                if pieces > 1:
                    skip = piece * per_piece
                    count = min(per_piece, n_parts - skip)
                    shared = parts + used + kv_head * head_bytes
                attend_tile(
                    tile, span, skip, count, shared, parts + (counters + kv_head) * CACHE_LINE
                )
                item = claim(args, 1)
            first_item += kv_heads * pieces
            used += kv_heads * head_bytes
            counters += kv_heads if pieces > 1 else 0


@helper
def _count_parts(args: int) -> int:
    """Partitions that the step's tiles see in all, for one KV head."""
    count = 0
    for seq in range(arg_i64(header(args), H_SEQS)):
        for number in range(_MOST_TILES):
            span = _span(args, seq, number)
            if span.queries <= 0:
                break
            count += span.end - span.first
    return count


@helper
def _span(args: int, seq: int, number: int) -> Span:
    """Tile `number` of a sequence, counted from its last, which has the most to do."""
    head = header(args)
    start = scalar_load_i32(arg_i64(head, H_QUERY_START), seq * 4)
    end = scalar_load_i32(arg_i64(head, H_QUERY_START), seq * 4 + 4)
    length = scalar_load_i32(arg_i64(head, H_SEQ_LENS), seq * 4)
    rows_per_query = arg_i64(args, _HEADS) // arg_i64(args, _KV_HEADS)
    most = max(1, TILE_ROWS // rows_per_query)
    window = arg_i64(args, _WINDOW) if arg_i64(args, _WINDOW) > 0 else _NO_WINDOW
    after = end - number * most
    token = max(start, after - most)
    position = length - end + token
    first = max(0, position - window + 1) // PARTITION
    last = (length - end + after - 1) // PARTITION
    return Span(seq, token, after - token, rows_per_query, position, window, first, last + 1)


@helper
def _part_bytes(args: int) -> int:
    value_dim: int = arg_i64(args, _VALUE_DIM)
    return 4 * ((value_dim + VALUE_COLUMNS - 1) // VALUE_COLUMNS * VALUE_COLUMNS) + STATE_BYTES


@helper
def _tile(args: int, tid: int, span: Span, kv_head: int) -> Tile:
    """The span's rows for one KV head, with their scaled queries in thread `tid`'s scratch."""
    head = header(args)
    table_blocks = arg_i64(head, H_TABLE_BLOCKS)
    table = arg_i64(args, _GROUP) * arg_i64(head, H_SEQS) + span.seq
    rows, row_bytes = span.queries * span.rows_per_query, _part_bytes(args)
    key_dim, value_dim = arg_i64(args, _KEY_DIM), arg_i64(args, _VALUE_DIM)
    first_head = kv_head * span.rows_per_query
    q = arg_i64(args, _Q) + 4 * (span.token * arg_i64(args, _Q_STRIDE) + first_head * key_dim)
    out = arg_i64(args, _OUT) + 4 * (
        span.token * arg_i64(args, _OUT_STRIDE) + first_head * value_dim
    )
    sinks = arg_i64(args, _SINKS)
    if sinks != 0:
        sinks += first_head * 4
    blocks = arg_i64(args, _SCRATCH) + tid * arg_i64(args, _SCRATCH_BYTES)
    widened = blocks + BLOCKS_BYTES
    parts = widened + 4 * LANES * tile_vectors() * max(key_dim, PARTITION)
    totals = parts + rows * row_bytes
    scores = totals + rows * row_bytes
    tile = Tile(
        rows=rows,
        rows_per_query=span.rows_per_query,
        position=span.position,
        window=span.window,
        softcap=arg_f32(args, _SOFTCAP),
        sinks=sinks,
        out=out,
        out_bytes=arg_i64(args, _OUT_STRIDE) * 4,
        key_dim=key_dim,
        value_dim=value_dim,
        part_bytes=row_bytes,
        blocks=blocks,
        parts=parts,
        totals=totals,
        scores=scores,
        q=scores + rows * SCORE_BYTES,
        widened=widened,
        widened_blocks=blocks + BLOCKS_BYTES // 2,
        table=arg_i64(head, H_BLOCK_TABLES) + table * table_blocks * 4,
        table_blocks=(span.position + span.queries - 1) // BLOCK_TOKENS + 1,
        cache=arg_i64(args, _CACHE) + kv_head * arg_i64(args, _HEAD_BYTES),
        block_bytes=arg_i64(args, _BLOCK_BYTES),
        code=args + 8 * _CODE,
        call=scores + rows * SCORE_BYTES + rows * key_dim * 4,
    )
    load_queries(tile, q, arg_i64(args, _Q_STRIDE) * 4, arg_f32(args, _SCALE))
    return tile
