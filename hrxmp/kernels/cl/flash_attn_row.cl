// Causal attention for one row, one key head a work-group, on CPU devices. With ROPE, q and k are
// rotated and k and v stored in their caches on the way: this row's own k and v belong to no other
// work-group, so nothing needs to wait.

#include "attend.h"
#if ROPE
#include "rope.h"

inline void turn_head(local float *x, local const float *cosines, local const float *sines) {
    for (int i = 0; i < PAIRS; i++) {
        float a = x[FIRST_OF(i)], b = x[SECOND_OF(i)];
        x[FIRST_OF(i)] = a * cosines[i] - b * sines[i];
        x[SECOND_OF(i)] = a * sines[i] + b * cosines[i];
    }
}
#endif

OF_VECTORS
kernel void flash_attn_row(int m, int capacity, int q_offset, int y_offset, float scale,
                           float freq_base, float freq_scale, global const float *q,
                           global const int *positions, global const float *factors,
                           global cached *k_cache, global cached *v_cache, global float *y) {
    local Attention attention;
    int kv_head = get_group_id(0);
    if (m == 0)
        return;
    int position = positions[0];
    q += q_offset;
    for (int h = 0; h < SHARED; h++)
        for (int p = 0; p < PARTS; p++)
            vstore16(vload16(p, q + (kv_head * SHARED + h) * HEAD_DIM), p, attention.query[h]);
#if ROPE
    local float cosines[PAIRS], sines[PAIRS], key[HEAD_DIM];
    rope_table(position, freq_base, freq_scale, factors, cosines, sines);
    for (int h = 0; h < SHARED; h++)
        turn_head(attention.query[h], cosines, sines);
    if (position >= 0 && position < capacity) {
        global const float *k = q + (HEADS + kv_head) * HEAD_DIM, *v = k + KV_WIDTH;
        size_t row = CACHE_ROW(kv_head, position, capacity);
        for (int i = 0; i < HEAD_DIM; i++)
            key[i] = k[i];
        turn_head(key, cosines, sines);
        for (int i = 0; i < HEAD_DIM; i++) {
            cache_store(key[i], row + i, k_cache);
            cache_store(v[i], row + i, v_cache);
        }
    }
#endif
    for (int h = 0; h < SHARED; h++)
        for (int p = 0; p < PARTS; p++)
            vstore16(vload16(p, attention.query[h]) * scale, p, attention.query[h]);
    attend_all(&attention, kv_head, capacity, k_cache, v_cache, 0, min(position + 1, capacity));
    for (int h = 0; h < SHARED; h++) {
        float total = attention.total[h], inverse = total > 0.0f ? 1.0f / total : 0.0f;
        for (int p = 0; p < PARTS; p++)
            vstore16(vload16(p, attention.sum[h]) * inverse, p,
                     y + y_offset + (kv_head * SHARED + h) * HEAD_DIM);
    }
}
