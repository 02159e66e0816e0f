// One head of one row a work-group: q is rotated in place, k is rotated into its cache, v is copied.

#include "cache.h"

// Elements 2i, 2i + 1 (norm) or i, i + N_DIMS / 2 (neox) turn together by position * base^(-2i/d).
inline float2 turn(float a, float b, int i, int position, float freq_base, float freq_scale,
                   global const float *factors) {
    float angle = (float)position * freq_scale * pow(freq_base, -2.0f * i / N_DIMS);
#if FACTORS
    angle /= factors[i];
#endif
    float c, s = sincos(angle, &c);
    return (float2)(a * c - b * s, a * s + b * c);
}

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
    size_t row = (size_t)position * KV_WIDTH + (head - HEADS) % KV_HEADS * HEAD_DIM;
    if (!is_query && !is_key) {
        for (int i = get_local_id(0); i < HEAD_DIM; i += LX)
            cache_store(x[i], row + i, v_cache);
        return;
    }
    for (int i = get_local_id(0); i < N_DIMS / 2; i += LX) {
        int first = NEOX ? i : 2 * i, second = NEOX ? i + N_DIMS / 2 : 2 * i + 1;
        float2 turned =
            turn(x[first], x[second], i, position, freq_base, freq_scale, factors);
        if (is_query) {
            x[first] = turned.x;
            x[second] = turned.y;
        } else {
            cache_store(turned.x, row + first, k_cache);
            cache_store(turned.y, row + second, k_cache);
        }
    }
    if (is_key)
        for (int i = N_DIMS + get_local_id(0); i < HEAD_DIM; i += LX)
            cache_store(x[i], row + i, k_cache);
}
