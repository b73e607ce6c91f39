// Launches a kernel of matvec.metal over the whole grid, one SIMD group after another.

#include "matvec.metal"

using Kernel = void (*)(const uchar *, const float *, float *, const long &, const long &,
                        const long &, const long &, const long &, const long &, uint2, uint, uint);

extern "C" void launch(Kernel run, const uchar *weights, const float *x, float *out,
                       const long *numbers, uint groups_x, uint groups_y) {
    for (uint group_y = 0; group_y < groups_y; group_y++) {
        for (uint group_x = 0; group_x < groups_x; group_x++) {
            for (uint simd = 0; simd < ROWS_PER_GROUP; simd++) {
                shim::run_lanes([&](uint lane) {
                    run(weights, x, out, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4],
                        numbers[5], {group_x, group_y}, simd, lane);
                });
            }
        }
    }
}
