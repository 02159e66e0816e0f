// One head of one row a work-group: q is rotated in place, k is rotated into its cache, v is copied.

#include "cache.h"
#include "rope.h"

__attribute__((reqd_work_group_size(LX, LY, LZ)))
kernel void rope_set_rows(int m, int capacity, int stride, int offset, float freq_base,
                          float freq_scale, global float *qkv, global const int *positions,
                          global const float *factors, global cached *k_cache,
                          global cached *v_cache) {
    int head = get_group_id(0), token = get_group_id(1);
    if (token >= m)
        return;
    int position = positions[token];
    bool is_query = head < HEADS, is_key = !is_query && head < HEADS + KV_HEADS;
    global float *x = qkv + offset + token * stride + head * HEAD_DIM;
    if (!is_query && (position < 0 || position >= capacity))
        return;
    size_t row = CACHE_ROW((head - HEADS) % KV_HEADS, position, capacity);
    if (!is_query && !is_key) {
        for (int i = get_local_id(0); i < HEAD_DIM; i += LX)
            cache_store(x[i], row + i, v_cache);
        return;
    }
    for (int i = get_local_id(0); i < PAIRS; i += LX) {
        float angle = angle_of(i, position, freq_base, freq_scale, factors);
        float c = cos(angle), s = sin(angle), a = x[FIRST_OF(i)], b = x[SECOND_OF(i)];
        if (is_query) {
            x[FIRST_OF(i)] = a * c - b * s;
            x[SECOND_OF(i)] = a * s + b * c;
        } else {
            cache_store(a * c - b * s, row + FIRST_OF(i), k_cache);
            cache_store(a * s + b * c, row + SECOND_OF(i), k_cache);
        }
    }
    if (is_key)
        for (int i = N_DIMS + get_local_id(0); i < HEAD_DIM; i += LX)
            cache_store(x[i], row + i, k_cache);
}
