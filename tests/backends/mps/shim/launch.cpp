// Launches a kernel of matvec.metal over the whole grid, one SIMD group after another.

#include "matvec.metal"

template <typename T>
using Kernel = void (*)(const uchar *, const T *, T *, const int *, uint2, uint, uint);

template <typename T>
static void launch(Kernel<T> run, const uchar *weights, const T *x, T *out, const int *shape,
                   uint groups, uint vectors) {
    shim::run_lanes([&](uint lane) {
        for (uint vector = 0; vector < vectors; vector++) {
            for (uint group = 0; group < groups; group++) {
                for (uint simd = 0; simd < ROWS_PER_GROUP; simd++) {
                    run(weights, x, out, shape, {group, vector}, simd, lane);
                }
            }
        }
    });
}

extern "C" void launch_float(Kernel<float> run, const uchar *weights, const float *x, float *out,
                             const int *shape, uint groups, uint vectors) {
    launch(run, weights, x, out, shape, groups, vectors);
}

extern "C" void launch_half(Kernel<half> run, const uchar *weights, const half *x, half *out,
                            const int *shape, uint groups, uint vectors) {
    launch(run, weights, x, out, shape, groups, vectors);
}
