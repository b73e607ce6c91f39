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
from typing import NamedTuple

from localllm.backends.base import BLOCK_TOKENS
from localllm.backends.cpu.kernel import (
    CACHE_LINE,
    H_BLOCK_TABLES,
    H_QUERY_START,
    H_SEQ_LENS,
    H_SEQS,
    H_TABLE_BLOCKS,
    arg_f32,
    arg_i64,
    claim,
    header,
    helper,
    kernel,
)
from localllm.backends.cpu.kernels.arguments import FIRST_WORD, Arguments
from localllm.backends.cpu.kernels.attention_rows import (
    PARTITION,
    SCORE_BYTES,
    Tile,
    add_sink,
    clear_total,
    compute_part,
    fold_part,
    load_query,
    part_bytes,
    write_row,
)
from localllm.backends.cpu.kernels.kv import VALUE_COLUMNS, value_columns
from localllm.backends.cpu.simd import (
    atomic_add,
    scalar_load_f32,
    scalar_load_i32,
    store_release,
)

TILE_ROWS = 48  # rows of a tile, unless a KV head has more query heads than that
ITEMS_PER_THREAD = 8  # a step's work is divided into about as many pieces
MOST_PARTS_BYTES = 32 << 20
BLOCKS_BYTES = 8 * (PARTITION // BLOCK_TOKENS + 8)  # a tile's list of blocks


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


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows of a full tile: whole queries, each with the query heads of one KV head."""
    per_query = heads // kv_heads
    return max(1, TILE_ROWS // per_query) * per_query


def scratch_bytes(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
    """Bytes that a thread needs; layers may share them."""
    row = 4 * key_dim + SCORE_BYTES + 2 * part_bytes(value_columns(value_dim))
    return -(-(row * tile_rows(heads, kv_heads) + BLOCKS_BYTES) // CACHE_LINE) * CACHE_LINE


def parts_bytes(nthreads: int, context: int, heads: int, kv_heads: int, value_dim: int) -> int:
    """Bytes for parts that several threads compute; layers may share them, the largest serves.

    What does not fit is computed by one thread. Only the memory that long contexts need is touched.
    """
    rows = ITEMS_PER_THREAD * nthreads * (heads // kv_heads) * -(-context // PARTITION)
    slots = min(rows * part_bytes(value_columns(value_dim)), MOST_PARTS_BYTES)
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
) = range(FIRST_WORD, FIRST_WORD + 20)
_NO_WINDOW = 1 << 40


class Span(NamedTuple):
    """The queries of one tile and the partitions that they see."""

    seq: int
    token: int  # the first query's row of q and out
    queries: int
    position: int  # of the first query
    first: int  # partition
    end: int


@kernel
def attend(args: int, tid: int, nthreads: int) -> None:
    """out = softmax(scale * q @ keys) @ values for every query row."""
    counters = arg_i64(args, _PARTS)
    most_pieces = ITEMS_PER_THREAD * nthreads
    slots_used = most_pieces * CACHE_LINE
    kv_heads = arg_i64(args, _KV_HEADS)
    per_piece = max(1, -(-_count_parts(args) * kv_heads // most_pieces))
    item, first_item, counter = claim(args, 1), 0, 0
    for seq in range(arg_i64(header(args), H_SEQS)):
        for tile in range(_tiles(args, seq) - 1, -1, -1):  # the longest first
            span = _span(args, seq, tile)
            pieces, slots = -(-(span.end - span.first) // per_piece), 0
            if pieces > 1:
                slots = kv_heads * (span.end - span.first) * _part_rows_bytes(args, span)
                if slots_used + slots > arg_i64(args, _PARTS_BYTES):
                    pieces, slots = 1, 0
            while item < first_item + kv_heads * pieces:
                kv_head, piece = divmod(item - first_item, pieces)
                if pieces == 1:
                    _attend_whole(args, tid, span, kv_head)
                else:
                    done = counters + (counter + kv_head) * CACHE_LINE
                    parts = counters + slots_used + kv_head * (slots // kv_heads)
                    _attend_piece(args, tid, span, kv_head, parts, piece * per_piece, per_piece)
                    if atomic_add(done, 0, 1) == pieces - 1:
                        store_release(done, 0, 0)
                        _fold_pieces(args, tid, span, kv_head, parts)
                item = claim(args, 1)
            first_item += kv_heads * pieces
            slots_used += slots
            counter += kv_heads if pieces > 1 else 0


@helper
def _rows_per_query(args: int) -> int:
    return int(arg_i64(args, _HEADS) // arg_i64(args, _KV_HEADS))


@helper
def _queries_per_tile(args: int) -> int:
    return max(1, TILE_ROWS // _rows_per_query(args))


@helper
def _tiles(args: int, seq: int) -> int:
    start = arg_i64(header(args), H_QUERY_START)
    queries = scalar_load_i32(start, seq * 4 + 4) - scalar_load_i32(start, seq * 4)
    return int(-(-queries // _queries_per_tile(args)))


@helper
def _span(args: int, seq: int, tile: int) -> Span:
    head = header(args)
    start = scalar_load_i32(arg_i64(head, H_QUERY_START), seq * 4)
    end = scalar_load_i32(arg_i64(head, H_QUERY_START), seq * 4 + 4)
    token = start + tile * _queries_per_tile(args)
    queries = min(_queries_per_tile(args), end - token)
    position = scalar_load_i32(arg_i64(head, H_SEQ_LENS), seq * 4) - end + token
    first = max(0, position - _window(args) + 1) // PARTITION
    last = (position + queries - 1) // PARTITION
    return Span(seq, token, queries, position, first, last + 1)


@helper
def _window(args: int) -> int:
    window = arg_i64(args, _WINDOW)
    return window if window > 0 else _NO_WINDOW


@helper
def _count_parts(args: int) -> int:
    """Partitions that the step's tiles see in all, for one KV head."""
    count = 0
    for seq in range(arg_i64(header(args), H_SEQS)):
        for tile in range(_tiles(args, seq)):
            span = _span(args, seq, tile)
            count += span.end - span.first
    return count


@helper
def _columns(args: int) -> int:
    blocks = (arg_i64(args, _VALUE_DIM) + VALUE_COLUMNS - 1) // VALUE_COLUMNS
    return int(blocks * VALUE_COLUMNS)


@helper
def _part_rows_bytes(args: int, span: Span) -> int:
    """Bytes of the parts of a span's rows for one partition and KV head."""
    return span.queries * _rows_per_query(args) * part_bytes(_columns(args))


@helper
def _scratch(args: int, tid: int) -> int:
    return int(arg_i64(args, _SCRATCH) + tid * arg_i64(args, _SCRATCH_BYTES))


@helper
def _tile(args: int, tid: int, span: Span, kv_head: int) -> Tile:
    """Takes thread `tid`'s scratch, where it puts the scaled queries."""
    head, scratch = header(args), _scratch(args, tid)
    table_blocks = arg_i64(head, H_TABLE_BLOCKS)
    row = arg_i64(args, _GROUP) * arg_i64(head, H_SEQS) + span.seq
    rows, key_dim = span.queries * _rows_per_query(args), arg_i64(args, _KEY_DIM)
    q = scratch + BLOCKS_BYTES + rows * (2 * part_bytes(_columns(args)) + SCORE_BYTES)
    tile = Tile(
        rows=rows,
        rows_per_query=_rows_per_query(args),
        position=span.position,
        window=_window(args),
        softcap=arg_f32(args, _SOFTCAP),
        q=q,
        key_dim=key_dim,
        value_columns=_columns(args),
        scores=q - rows * SCORE_BYTES,
        blocks=scratch,
        table=arg_i64(head, H_BLOCK_TABLES) + row * table_blocks * 4,
        table_blocks=(span.position + span.queries - 1) // BLOCK_TOKENS + 1,
        cache=arg_i64(args, _CACHE) + kv_head * arg_i64(args, _HEAD_BYTES),
        block_bytes=arg_i64(args, _BLOCK_BYTES),
    )
    for i in range(rows):
        query, r = divmod(i, tile.rows_per_query)
        index = kv_head * tile.rows_per_query + r
        at = (span.token + query) * arg_i64(args, _Q_STRIDE) + index * key_dim
        load_query(
            arg_i64(args, _Q) + at * 4,
            key_dim,
            arg_f32(args, _SCALE),
            tile.softcap,
            q + i * key_dim * 4,
        )
    return tile


@helper
def _attend_whole(args: int, tid: int, span: Span, kv_head: int) -> None:
    """All partitions of a tile in order."""
    tile = _tile(args, tid, span, kv_head)
    step = part_bytes(tile.value_columns)
    parts = tile.blocks + BLOCKS_BYTES
    totals = parts + tile.rows * step
    for row in range(tile.rows):
        clear_total(totals + row * step, tile.value_columns)
    for part in range(span.first, span.end):
        compute_part(tile, part, parts)
        for row in range(tile.rows):
            fold_part(totals + row * step, parts + row * step, tile.value_columns)
    for row in range(tile.rows):
        _finish(args, span, kv_head, row, totals + row * step)


@helper
def _attend_piece(
    args: int, tid: int, span: Span, kv_head: int, parts: int, first: int, count: int
) -> None:
    """Some of a tile's partitions, into their places in `parts`."""
    tile = _tile(args, tid, span, kv_head)
    rows_bytes = tile.rows * part_bytes(tile.value_columns)
    for i in range(first, min(first + count, span.end - span.first)):
        compute_part(tile, span.first + i, parts + i * rows_bytes)


@helper
def _fold_pieces(args: int, tid: int, span: Span, kv_head: int, parts: int) -> None:
    """What `_attend_whole` does with its parts, once all threads have finished theirs."""
    columns = _columns(args)
    total, step = _scratch(args, tid) + BLOCKS_BYTES, part_bytes(columns)
    rows = span.queries * _rows_per_query(args)
    for row in range(rows):
        clear_total(total, columns)
        for i in range(span.end - span.first):
            fold_part(total, parts + (i * rows + row) * step, columns)
        _finish(args, span, kv_head, row, total)


@helper
def _finish(args: int, span: Span, kv_head: int, row: int, total: int) -> None:
    columns, value_dim = _columns(args), arg_i64(args, _VALUE_DIM)
    query, r = divmod(row, _rows_per_query(args))
    index = kv_head * _rows_per_query(args) + r
    if arg_i64(args, _SINKS) != 0:
        add_sink(total, columns, scalar_load_f32(arg_i64(args, _SINKS), index * 4))
    at = (span.token + query) * arg_i64(args, _OUT_STRIDE) + index * value_dim
    write_row(total, columns, arg_i64(args, _OUT) + at * 4, value_dim)
