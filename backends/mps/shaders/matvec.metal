// Products of quantized matrices, in the file's own layout, with up to COLUMNS vectors at a time.
//
// A SIMD group computes one row for a few vectors. Its lanes take turns at units of 32 weights: a
// lane brings a unit to float32, as gguf-py does to the bit, and then adds its products with each
// vector. A result's order of sums depends on nothing but the row's length, and all products are
// fused, so that nothing is left for a compiler to fuse in one place and not in another. Tests
// compile this file as C++ too: it keeps to what both languages have.

#include <metal_stdlib>
using namespace metal;

constant constexpr int UNIT = 32;
constant constexpr int LANES = 32;
constant constexpr int ROWS_PER_GROUP = 4;
constant constexpr int COLUMNS = 8;

#define UNROLLED _Pragma("clang loop unroll(full)")  // so that sums stay in registers

static inline float half_at(device const uchar *bytes) {
    return float(as_type<half>(ushort(bytes[0] | (bytes[1] << 8))));
}

// Each format: a row's `unit`-th 32 weights.

static inline void unpack_q4_0(device const uchar *row, int unit, thread float *w) {
    device const uchar *block = row + unit * 18;
    float scale = half_at(block);
    for (int i = 0; i < 16; i++) {
        int pair = block[2 + i];
        w[i] = float((pair & 15) - 8) * scale;
        w[i + 16] = float((pair >> 4) - 8) * scale;
    }
}

static inline void unpack_q8_0(device const uchar *row, int unit, thread float *w) {
    device const uchar *block = row + unit * 34;
    float scale = half_at(block);
    for (int i = 0; i < UNIT; i++) {
        w[i] = float(as_type<char>(block[2 + i])) * scale;
    }
}

// A super-block of 256: d, dmin, 12 bytes of 6-bit scales and mins, nibbles.
static inline void unpack_q4_k(device const uchar *row, int unit, thread float *w) {
    device const uchar *block = row + (unit / 8) * 144;
    device const uchar *packed = block + 4;
    int u = unit % 8;
    int scale, least;
    if (u < 4) {
        scale = packed[u] & 63;
        least = packed[u + 4] & 63;
    } else {
        scale = (packed[u + 4] & 15) | ((packed[u - 4] >> 6) << 4);
        least = (packed[u + 4] >> 4) | ((packed[u] >> 6) << 4);
    }
    device const uchar *pairs = block + 16 + (u / 2) * 32;
    int shift = (u % 2) * 4;
    float d = half_at(block) * float(scale);
    float m = half_at(block + 2) * float(least);
    for (int i = 0; i < UNIT; i++) {
        w[i] = fma(d, float((pairs[i] >> shift) & 15), -m);  // the product is exact
    }
}

// A super-block of 256: low nibbles, high bit pairs, 16 scales, d.
static inline void unpack_q6_k(device const uchar *row, int unit, thread float *w) {
    device const uchar *block = row + (unit / 8) * 210;
    int u = unit % 8;
    int quarter = u % 4;
    device const uchar *low = block + (u / 4) * 64 + (quarter % 2) * 32;
    device const uchar *high = block + 128 + (u / 4) * 32;
    device const uchar *scales = block + 192 + 2 * u;
    int low_shift = (quarter / 2) * 4;
    int high_shift = quarter * 2;
    float d = half_at(block + 208);
    for (int i = 0; i < UNIT; i++) {
        int code = ((low[i] >> low_shift) & 15) | (((high[i] >> high_shift) & 3) << 4);
        w[i] = d * float(as_type<char>(scales[i / 16])) * float(code - 32);
    }
}

// out [vectors, rows] = x [vectors, columns] times weights [rows, columns], transposed. `columns` is
// a multiple of the format's block, and from one vector to the next are `x_stride` and `out_stride`
// elements. Grid: groups of ROWS_PER_GROUP rows, groups of COLUMNS vectors.
#define MATVEC(NAME, UNPACK)                                                                       \
    kernel void NAME(device const uchar *weights [[buffer(0)]],                                    \
                     device const float *x [[buffer(1)]],                                          \
                     device float *out [[buffer(2)]],                                              \
                     constant long &vectors [[buffer(3)]],                                         \
                     constant long &rows [[buffer(4)]],                                            \
                     constant long &columns [[buffer(5)]],                                         \
                     constant long &row_bytes [[buffer(6)]],                                       \
                     constant long &x_stride [[buffer(7)]],                                        \
                     constant long &out_stride [[buffer(8)]],                                      \
                     uint2 group [[threadgroup_position_in_grid]],                                 \
                     uint simd_index [[simdgroup_index_in_threadgroup]],                           \
                     uint lane [[thread_index_in_simdgroup]]) {                                    \
        long row = long(group.x) * ROWS_PER_GROUP + long(simd_index);                              \
        if (row >= rows) {                                                                         \
            return;                                                                                \
        }                                                                                          \
        long first = long(group.y) * COLUMNS;                                                      \
        device const uchar *bytes = weights + row * row_bytes;                                     \
        float sums[COLUMNS] = {};                                                                  \
        float w[UNIT];                                                                             \
        for (int unit = int(lane); unit < int(columns) / UNIT; unit += LANES) {                    \
            UNPACK(bytes, unit, w);                                                                \
            UNROLLED for (int c = 0; c < COLUMNS; c++) {                                           \
                if (first + c < vectors) {                                                         \
                    device const float *part = x + (first + c) * x_stride + unit * UNIT;           \
                    for (int i = 0; i < UNIT; i++) {                                               \
                        sums[c] = fma(w[i], part[i], sums[c]);                                     \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        UNROLLED for (int c = 0; c < COLUMNS; c++) {                                               \
            if (first + c < vectors) {                                                             \
                float sum = simd_sum(sums[c]);                                                     \
                if (lane == 0) {                                                                   \
                    out[(first + c) * out_stride + row] = sum;                                     \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

MATVEC(matvec_q4_0, unpack_q4_0)
MATVEC(matvec_q8_0, unpack_q8_0)
MATVEC(matvec_q4_k, unpack_q4_k)
MATVEC(matvec_q6_k, unpack_q6_k)
