"""A chunk of weights in registers, from the planes that `layout` describes.

Every kernel that reads weights calls `weights_chunk`, so a format is written down once. Values are
float32, the file's exactly or within one rounding of the fused multiply-add with the min.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(128)
TILE_ROWS = tl.constexpr(64)


@triton.jit
def _nibbles(codes, row):
    words = tl.load(codes + row[:, None, None] * 16 + tl.arange(0, 16)[None, None, :])
    return (words >> (tl.arange(0, 8) * 4)[None, :, None]) & 15


@triton.jit
def _pairs(codes, row, ROWS: tl.constexpr):
    words = tl.load(codes + row[:, None, None] * 8 + tl.arange(0, 8)[None, None, :])
    pairs = (words >> (tl.arange(0, 16) * 2)[None, :, None]) & 3
    return tl.reshape(pairs, (ROWS, 8, 16))


@triton.jit
def _bits(high, row, ROWS: tl.constexpr):
    words = tl.load(high + row[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]).to(tl.int32)
    bits = (words >> tl.arange(0, 16)[None, :, None]) & 1
    return tl.reshape(bits, (ROWS, 8, 16))


@triton.jit
def _per_16(plane, row):
    return tl.load(plane + row[:, None] * 8 + tl.arange(0, 8)[None, :])


@triton.jit
def _per_32(plane, row, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """Entries FIRST..FIRST+4 of WIDTH, each for two runs of 16."""
    return tl.load(plane + row[:, None] * WIDTH + (FIRST + tl.arange(0, 8)[None, :] // 2))


@triton.jit
def _table(codes, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Signed bytes by a 4-bit code, out of four words: no memory is read."""
    low = tl.where((codes & 4) == 0, a, b)
    high = tl.where((codes & 4) == 0, c, d)
    words = tl.where((codes & 8) == 0, low, high)
    return ((words >> ((codes & 3) * 8)) << 24) >> 24


@triton.jit
def _power_of_two_half(exponent):
    """2 ** (e - 128), also where that is no normal number."""
    e = exponent.to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _codes(codes, high, row, FORMAT: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS, 8, 16] int32, as they are stored."""
    if FORMAT == "Q8_0":
        at = tl.arange(0, 8)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        q = tl.load(codes + row[:, None, None] * 128 + at).to(tl.int32)
    elif FORMAT == "Q2_K":
        q = _pairs(codes, row, ROWS)
    elif FORMAT == "Q3_K":
        q = _pairs(codes, row, ROWS) | (_bits(high, row, ROWS) << 2)
    elif FORMAT == "Q6_K":
        q = _nibbles(codes, row) | (_pairs(high, row, ROWS) << 4)
    elif FORMAT == "Q5_0" or FORMAT == "Q5_1" or FORMAT == "Q5_K":
        q = _nibbles(codes, row) | (_bits(high, row, ROWS) << 4)
    else:
        q = _nibbles(codes, row)
    return q


@triton.jit
def _quantized_chunk(
    codes, high, scales, supers, row, super_row, FORMAT: tl.constexpr, ROWS: tl.constexpr
):
    q = _codes(codes, high, row, FORMAT, ROWS)
    if FORMAT == "IQ4_NL" or FORMAT == "IQ4_XS":
        q = _table(q, -1079142271, -152379953, 639175937, 1901675829)
    elif FORMAT == "MXFP4":
        q = _table(q, 50462976, 201852420, -33620224, -185009412)
    elif FORMAT == "Q4_0":
        q -= 8
    elif FORMAT == "Q5_0":
        q -= 16
    elif FORMAT == "Q3_K":
        q -= 4
    elif FORMAT == "Q6_K":
        q -= 32
    values = q.to(tl.float32)

    if FORMAT == "Q4_1" or FORMAT == "Q5_1":
        scale = _per_32(scales, row, 4, 0).to(tl.float32)
        least = _per_32(supers, row, 4, 0).to(tl.float32)
        values = tl.fma(values, scale[:, :, None], least[:, :, None])
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K" or FORMAT == "Q2_K":
        d = tl.load(supers + super_row * 2).to(tl.float32)[:, None]
        d_min = tl.load(supers + super_row * 2 + 1).to(tl.float32)[:, None]
        if FORMAT == "Q2_K":
            both = _per_16(scales, row)
            scale = d * (both & 15).to(tl.float32)
            least = d_min * (both >> 4).to(tl.float32)
        else:
            scale = d * _per_32(scales, row, 8, 0).to(tl.float32)
            least = d_min * _per_32(scales, row, 8, 4).to(tl.float32)
        values = tl.fma(values, scale[:, :, None], -least[:, :, None])
    else:
        if FORMAT == "MXFP4":
            scale = _power_of_two_half(_per_32(scales, row, 4, 0))
        elif FORMAT == "Q3_K" or FORMAT == "Q6_K":
            d = tl.load(supers + super_row).to(tl.float32)[:, None]
            scale = d * _per_16(scales, row).to(tl.float32)
        elif FORMAT == "IQ4_XS":
            d = tl.load(supers + super_row).to(tl.float32)[:, None]
            scale = d * _per_32(scales, row, 4, 0).to(tl.float32)
        else:
            scale = _per_32(scales, row, 4, 0).to(tl.float32)
        values = values * scale[:, :, None]
    return tl.reshape(values, (ROWS, 128))


@triton.jit
def weights_chunk(
    codes,
    high,
    scales,
    supers,
    rows,
    n_rows,
    cols,
    chunk,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """weights[rows, 128 * chunk : 128 * (chunk + 1)] as [ROWS, 128], zeros beyond `cols`.

    `rows` [ROWS] may lie beyond n_rows: such rows hold anything. Quantized values are float32,
    plain ones as stored.
    """
    if FORMAT == "F32" or FORMAT == "F16" or FORMAT == "BF16":
        k = chunk * CHUNK + tl.arange(0, 128)
        at = rows.to(tl.int64)[:, None] * cols + k[None, :]
        mask = (rows < n_rows)[:, None] & (k < cols)[None, :]
        return tl.load(codes + at, mask=mask, other=0.0)
    else:
        chunks = tl.cdiv(cols, CHUNK)
        last_tile = tl.cdiv(n_rows, TILE_ROWS) - 1
        tile = tl.minimum(rows // TILE_ROWS, last_tile).to(tl.int64)
        inner = rows % TILE_ROWS
        row = (tile * chunks + chunk) * TILE_ROWS + inner
        super_row = (tile * tl.cdiv(chunks, 2) + chunk // 2) * TILE_ROWS + inner
        return _quantized_chunk(codes, high, scales, supers, row, super_row, FORMAT, ROWS)
