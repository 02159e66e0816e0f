// Causal attention of one query head of one row a work-group, in one pass over the cache with a
// running maximum. Any device: LX work-items take cache rows in turn, each with its own sums, and
// merge at the end.

#include "cache.h"

__attribute__((reqd_work_group_size(LX, LY, LZ)))
kernel void flash_attn(int m, int capacity, int q_stride, int q_offset, int y_stride, int y_offset,
                       float scale, global const float *q, global const cached *k_cache,
                       global const cached *v_cache, global const int *positions, global float *y) {
    local float tops[LX], totals[LX], merged[LX][HEAD_DIM];
    int head = get_group_id(0), token = get_group_id(1), lane = get_local_id(0);
    if (token >= m)
        return;
    int rows = min(positions[token] + 1, capacity);
    q += q_offset + token * q_stride + head * HEAD_DIM;
    float query[HEAD_DIM], sum[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM; i++) {
        query[i] = q[i] * scale;
        sum[i] = 0.0f;
    }
    float top = -INFINITY, total = 0.0f;
    for (int row = lane; row < rows; row += LX) {
        size_t at = CACHE_ROW(head / SHARED, row, capacity);
        float score = 0.0f;
        for (int i = 0; i < HEAD_DIM; i++)
            score = mad(query[i], cache_load(at + i, k_cache), score);
        float next = fmax(top, score), keep = exp(top - next), weight = exp(score - next);
        total = total * keep + weight;
        for (int i = 0; i < HEAD_DIM; i++)
            sum[i] = mad(weight, cache_load(at + i, v_cache), sum[i] * keep);
        top = next;
    }
    tops[lane] = top;
    totals[lane] = total;
    for (int i = 0; i < HEAD_DIM; i++)
        merged[lane][i] = sum[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float highest = -INFINITY, all = 0.0f;
    for (int i = 0; i < LX; i++)
        highest = fmax(highest, tops[i]);
    for (int i = 0; i < LX; i++)
        all += totals[i] == 0.0f ? 0.0f : totals[i] * exp(tops[i] - highest);
    y += y_offset + token * y_stride + head * HEAD_DIM;
    for (int i = lane; i < HEAD_DIM; i += LX) {
        float value = 0.0f;
        for (int j = 0; j < LX; j++)
            value += totals[j] == 0.0f ? 0.0f : merged[j][i] * exp(tops[j] - highest);
        y[i] = all > 0.0f ? value / all : 0.0f;
    }
}
