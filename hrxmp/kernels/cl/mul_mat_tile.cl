// y = x w for many rows x, weights in layout lane16, on CPU devices: one work-item a work-group.
//
// A work-group owns PANEL row groups and TOKENS rows of x. It takes DEPTH elements of k at a time:
// dequantises the panel once into local memory (which stays in the first-level cache), then holds
// TILE x PANEL results in registers and multiplies. Sums over k wait in local memory meanwhile.

#include "lanes.h"
#include "mul_mat.h"
#include "tile.h"

#define WIDTH (PANEL * 16)
#define STEPS ((TOTAL_GROUPS * (1 + SWIGLU) + PANEL - 1) / PANEL)
#if X_STRIDE
#define STRIDE X_STRIDE
#else
#define STRIDE x_stride
#endif

// The panel's part `lane`: with swiglu, the first half are rows of w0 and the second of w1.
inline Target panel_target(int panel, int part, global const uchar *w0, global const uchar *w1,
                           global const uchar *w2) {
#if SWIGLU
    int group = min(panel * (PANEL / 2) + part % (PANEL / 2), GROUPS(N0) - 1);
    Target target = target_of(group, w0, w1, w2);
    if (part >= PANEL / 2) {
        target.weights = row_group(TYPE1, K, w1, group);
        target.matrix = 1;
    }
    return target;
#else
    return target_of(min(panel * PANEL + part, TOTAL_GROUPS - 1), w0, w1, w2);
#endif
}

DEFINE_MULTIPLY(multiply, global)
DEFINE_MULTIPLY_ALL(multiply_all, multiply, global)

OF_VECTORS
kernel void mul_mat_tile(int m, int x_stride, int x_offset, int r_stride, int r_offset,
                         int y_stride, int y_offset, global const float *x,
                         global const uchar *w0, global const uchar *w1, global const uchar *w2,
                         global const float *residual, global float *y) {
    local float weights[DEPTH * WIDTH] __attribute__((aligned(64)));
    local float sums[TOKENS * WIDTH] __attribute__((aligned(64)));
    int panel = get_group_id(0), first = get_group_id(1) * TOKENS;
    int rows = min(m - first, TOKENS);
    if (rows <= 0)
        return;
    for (int i = 0; i < rows * PANEL; i++)
        vstore16((float16)0.0f, i, sums);
    x += x_offset + first * STRIDE;
    for (int start = 0; start < K; start += DEPTH) {
        int depth = min(K - start, DEPTH);
        for (int part = 0; part < PANEL; part++) {
            Target target = panel_target(panel, part, w0, w1, w2);
            for (int k = 0; k < depth; k += 32)
                WITH_TYPE_OF(target, dequantize16, K, target.weights, (start + k) / 32,
                             weights + k * WIDTH + part * 16, WIDTH);
        }
        multiply_all(rows, x + start, STRIDE, weights, WIDTH, depth, sums, WIDTH);
    }
    for (int part = 0; part < PANEL / (1 + SWIGLU); part++) {
        if (panel * (PANEL / (1 + SWIGLU)) + part >= TOTAL_GROUPS)
            break;
        Target target = panel_target(panel, part, w0, w1, w2);
        for (int t = 0; t < rows; t++) {
            float16 value = vload16(t * PANEL + part, sums);
#if SWIGLU
            value = swiglu16(value, vload16(t * PANEL + PANEL / 2 + part, sums));
#elif ADD
            value += load16(residual + r_offset + (first + t) * r_stride + target.row, target.count);
#endif
            store16(value, y + y_offset + (first + t) * y_stride + target.row, target.count);
        }
    }
}
