// y = w x for one row x, weights in layout lane16, on CPU devices: one work-item does the rows of
// a work-group with explicit vectors. Epilogues: add a residual; silu(w0 x) * (w1 x).

#define K_MAX K
#include "dot.h"
#include "mul_mat.h"

OF_VECTORS
kernel void mul_mat_vec(int m, int x_offset, int r_offset, int y_offset, float eps,
                        global const float *x, global const float *norm_w,
                        global const uchar *w0, global const uchar *w1, global const uchar *w2,
                        global const float *residual, global float *y) {
    local Activations activations;
    if (m == 0)
        return;
    read_activations(TYPE0, K, NORM, &activations, x + x_offset, norm_w, eps);
    int parts = get_num_groups(0), part = get_group_id(0);
    int end = TOTAL_GROUPS * (part + 1) / parts;
    for (int group = TOTAL_GROUPS * part / parts; group < end; group++) {
        Target target = target_of(group, w0, w1, w2), next = target_of(group + 1, w0, w1, w2);
        float16 value;
        WITH_TYPE_OF(target, value = dot16, K, target.weights, next.weights, &activations);
#if SWIGLU
        global const uchar *up = row_group(TYPE1, K, w1, group);
        value = swiglu16(value, dot16(TYPE1, K, up, row_group(TYPE1, K, w1, group + 1),
                                      &activations));
#elif ADD
        value += load16(residual + r_offset + target.row, target.count);
#endif
        store16(value, y + y_offset + target.row, target.count);
    }
}
