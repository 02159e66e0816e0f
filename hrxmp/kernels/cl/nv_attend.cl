// Causal attention, one query head of one row a work-group.

#include "nv_attention.h"

KERNEL nv_attend(int m, int capacity, int q_stride, int q_offset, int y_stride, int y_offset,
                 float scale, float freq_base, float freq_scale, global const float *q,
                 global const int *positions, global const float *factors, global cached *k_cache,
                 global cached *v_cache, global float *y) {
    local Attending own;
    local float scratch[LX];
    int head = get_group_id(0), token = get_group_id(1);
    if (token >= m)
        return;
    attend_head(head, positions[token], capacity, scale, freq_base, freq_scale,
                q + q_offset + token * q_stride, factors, k_cache, v_cache,
                y + y_offset + token * y_stride, (Split){0, 1, 0, 0}, &own, scratch);
}
