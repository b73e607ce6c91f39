"""What attention's parts share: the rows of a tile, and how their intermediate results lie.

A tile's rows are numbered query by query, each with the query heads of one KV head. Positions
inside a partition count from its start.

A row's part has `Tile.part_bytes`: the float32 sum of weighted values [value columns], then its
state: the largest score and the sum of weights (float32), and the range of positions that the row
sees (int64).
"""

from __future__ import annotations

from typing import NamedTuple

STATE_BYTES = 64
LARGEST, WEIGHTS, LOW, HIGH = 0, 4, 8, 16  # offsets in a row's state


class Span(NamedTuple):
    """Some neighbouring queries of one sequence, and the partitions that they see."""

    seq: int
    token: int  # the first query's row of q and out
    queries: int  # 0 or less: the sequence has no such tile
    rows_per_query: int
    position: int  # of the first query
    window: int  # larger than any position: none
    first: int  # partition
    end: int


class Tile(NamedTuple):
    """Rows of one KV head and where their data is; all addresses, and sizes named _bytes."""

    rows: int
    rows_per_query: int
    position: int  # of the first query
    window: int  # larger than any position: none
    softcap: float  # 0: none
    sinks: int  # float32 [rows_per_query], or 0
    out: int  # the first row's output; queries are out_bytes apart, heads value_dim
    out_bytes: int
    key_dim: int
    value_dim: int
    part_bytes: int
    blocks: int  # int64 [2 * PARTITION_BLOCKS], of a partition and of the next one
    parts: int  # [rows]
    totals: int  # parts of all partitions so far [rows]
    scores: int  # float32 [rows], SCORE_BYTES each
    q: int  # float32 [rows, key_dim], scaled
    widened: int  # float32, keys of neighbouring blocks or some columns of a partition's values
    widened_blocks: int  # int64 [2 * PARTITION_BLOCKS], of such keys or values
    table: int  # int32, the sequence's blocks
    table_blocks: int  # blocks that the last query reaches
    cache: int  # of the KV head in block 0
    block_bytes: int
    code: int  # int64: addresses of the tile kernels, in the order of `AttendArgs`
    call: int  # int64 [CALL_WORDS], for their arguments
