// Matrix-vector products with quantized weights in the file's own layout.
//
// A SIMD group computes one row for one column of x. Its lanes take turns at units of 32 elements,
// so a result's order of sums depends on nothing but the row's length. Tests compile this file as
// C++ too: it keeps to what both languages have.

#include <metal_stdlib>
using namespace metal;

constant constexpr int UNIT = 32;
constant constexpr int LANES = 32;
constant constexpr int ROWS_PER_GROUP = 4;

static inline float half_at(device const uchar *bytes) {
    return float(as_type<half>(ushort(bytes[0] | (bytes[1] << 8))));
}

// Each format: bytes of a row's `unit`-th 32 elements, times x.

template <typename T>
static inline float dot_q4_0(device const uchar *row, int unit, device const T *x) {
    device const uchar *block = row + unit * 18;
    float sum = 0.0f;
    for (int i = 0; i < 16; i++) {
        int pair = block[2 + i];
        sum += float((pair & 15) - 8) * float(x[i]);
        sum += float((pair >> 4) - 8) * float(x[i + 16]);
    }
    return half_at(block) * sum;
}

template <typename T>
static inline float dot_q8_0(device const uchar *row, int unit, device const T *x) {
    device const uchar *block = row + unit * 34;
    float sum = 0.0f;
    for (int i = 0; i < UNIT; i++) {
        sum += float(as_type<char>(block[2 + i])) * float(x[i]);
    }
    return half_at(block) * sum;
}

// A super-block of 256: d, dmin, 12 bytes of 6-bit scales and mins, nibbles.
template <typename T>
static inline float dot_q4_k(device const uchar *row, int unit, device const T *x) {
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
    float products = 0.0f, sum = 0.0f;
    for (int i = 0; i < UNIT; i++) {
        float value = float(x[i]);
        products += float((pairs[i] >> shift) & 15) * value;
        sum += value;
    }
    return half_at(block) * float(scale) * products - half_at(block + 2) * float(least) * sum;
}

// A super-block of 256: low nibbles, high bit pairs, 16 scales, d.
template <typename T>
static inline float dot_q6_k(device const uchar *row, int unit, device const T *x) {
    device const uchar *block = row + (unit / 8) * 210;
    int u = unit % 8;
    int quarter = u % 4;
    device const uchar *low = block + (u / 4) * 64 + (quarter % 2) * 32;
    device const uchar *high = block + 128 + (u / 4) * 32;
    device const uchar *scales = block + 192 + 2 * u;
    int low_shift = (quarter / 2) * 4;
    int high_shift = quarter * 2;
    float total = 0.0f;
    for (int part = 0; part < 2; part++) {
        float sum = 0.0f;
        for (int i = part * 16; i < part * 16 + 16; i++) {
            int code = ((low[i] >> low_shift) & 15) | (((high[i] >> high_shift) & 3) << 4);
            sum += float(code - 32) * float(x[i]);
        }
        total += float(as_type<char>(scales[part])) * sum;
    }
    return half_at(block + 208) * total;
}

// shape: rows, columns of weights (a multiple of the block), bytes of a row.
// x [vectors, columns] and out [vectors, rows] are contiguous; grid: (row groups, vectors).
#define MATVEC(NAME, DOT, T)                                                                       \
    kernel void NAME(device const uchar *weights [[buffer(0)]],                                    \
                     device const T *x [[buffer(1)]],                                              \
                     device T *out [[buffer(2)]],                                                  \
                     device const int *shape [[buffer(3)]],                                        \
                     uint2 group [[threadgroup_position_in_grid]],                                 \
                     uint simd_index [[simdgroup_index_in_threadgroup]],                           \
                     uint lane [[thread_index_in_simdgroup]]) {                                    \
        int rows = shape[0], columns = shape[1];                                                   \
        int row = int(group.x) * ROWS_PER_GROUP + int(simd_index);                                 \
        if (row >= rows) {                                                                         \
            return;                                                                                \
        }                                                                                          \
        device const uchar *bytes = weights + ulong(row) * ulong(shape[2]);                        \
        device const T *vector = x + ulong(group.y) * ulong(columns);                              \
        float sum = 0.0f;                                                                          \
        for (int unit = int(lane); unit < columns / UNIT; unit += LANES) {                         \
            sum += DOT(bytes, unit, vector + unit * UNIT);                                         \
        }                                                                                          \
        sum = simd_sum(sum);                                                                       \
        if (lane == 0) {                                                                           \
            out[ulong(group.y) * ulong(rows) + ulong(row)] = T(sum);                               \
        }                                                                                          \
    }

MATVEC(matvec_q4_0_float, dot_q4_0, float)
MATVEC(matvec_q4_0_half, dot_q4_0, half)
MATVEC(matvec_q8_0_float, dot_q8_0, float)
MATVEC(matvec_q8_0_half, dot_q8_0, half)
MATVEC(matvec_q4_k_float, dot_q4_k, float)
MATVEC(matvec_q4_k_half, dot_q4_k, half)
MATVEC(matvec_q6_k_float, dot_q6_k, float)
MATVEC(matvec_q6_k_half, dot_q6_k, half)
