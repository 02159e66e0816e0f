// Causal attention for many rows on CPU devices: one key head and TOKENS rows of q a work-group,
// whose query heads are the rows of one small matrix. Takes 64 cache rows at a time, as float32 in
// local memory (keys turned), and runs the register tiles of `tile.h` over them.

#include "cache.h"
#include "vector.h"
#define PANEL 4
#include "tile.h"

#define COLUMNS 64  // cache rows at a time: PANEL vectors
#define QUERIES (TOKENS * SHARED)
DEFINE_MULTIPLY(multiply, local)
DEFINE_MULTIPLY_ALL(multiply_all, multiply, local)

// One step of turning a square of 16 vectors: blocks of WIDTH change places between rows that are
// WIDTH apart.
#define SWAP(WIDTH, FROM_FIRST, FROM_SECOND)                                                       \
    _Pragma("unroll") for (int i = 0; i < 16; i++) if ((i & WIDTH) == 0) {                         \
        float16 a = v[i], b = v[i + WIDTH];                                                        \
        v[i] = __builtin_shufflevector(a, b, FROM_FIRST);                                          \
        v[i + WIDTH] = __builtin_shufflevector(a, b, FROM_SECOND);                                 \
    }
#define FIRST8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SECOND8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define FIRST4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define SECOND4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define FIRST2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define SECOND2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define FIRST1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define SECOND1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31

// Keys of 64 cache rows, turned: to[i][row]. Rows from `rows` on repeat the last one.
inline void load_keys(global const cached *k_cache, size_t at, int rows, local float *to) {
    for (int r = 0; r < COLUMNS; r += 16)
        for (int p = 0; p < HEAD_DIM / 16; p++) {
            float16 v[16];
#pragma unroll
            for (int i = 0; i < 16; i++)
                v[i] = cache_load16(p, k_cache + at + (size_t)min(r + i, rows - 1) * HEAD_DIM);
            SWAP(8, FIRST8, SECOND8)
            SWAP(4, FIRST4, SECOND4)
            SWAP(2, FIRST2, SECOND2)
            SWAP(1, FIRST1, SECOND1)
#pragma unroll
            for (int j = 0; j < 16; j++)
                vstore16(v[j], 0, to + (p * 16 + j) * COLUMNS + r);
        }
}

inline void load_values(global const cached *v_cache, size_t at, int rows, local float *to) {
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < HEAD_DIM / 16; p++)
            vstore16(cache_load16(p, v_cache + at + (size_t)r * HEAD_DIM), p, to + r * HEAD_DIM);
}

// Scores of one query -> weights; `visible` columns count. Its sums shrink to the new maximum.
inline void weigh(local float *score, int visible, local float *top, local float *total,
                  local float *sum) {
    float16 s[PANEL], highest = -INFINITY, all = 0.0f;
#pragma unroll
    for (int p = 0; p < PANEL; p++) {
        int16 index = p * 16 + (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        s[p] = select((float16)-INFINITY, vload16(p, score), index < visible);
        highest = fmax(highest, s[p]);
    }
    float next = fmax(max16(highest), *top);
    // A query that sees nothing yet keeps its zeros.
    float base = next == -INFINITY ? 0.0f : next, keep = exp(*top - base);
#pragma unroll
    for (int p = 0; p < PANEL; p++) {
        s[p] = exp16(s[p] - base);
        all += s[p];
        vstore16(s[p], p, score);
    }
    *total = *total * keep + sum16(all);
    *top = next;
    if (keep != 1.0f)
        for (int p = 0; p < HEAD_DIM / 16; p++)
            vstore16(vload16(p, sum) * keep, p, sum);
}

OF_VECTORS
kernel void flash_attn_tile(int m, int capacity, int q_stride, int q_offset, int y_stride,
                            int y_offset, float scale, global const float *q,
                            global const cached *k_cache, global const cached *v_cache,
                            global const int *positions, global float *y) {
    local float query[QUERIES * HEAD_DIM], sum[QUERIES * HEAD_DIM], score[QUERIES * COLUMNS];
    local float keys[HEAD_DIM * COLUMNS], values[COLUMNS * HEAD_DIM];
    local float top[QUERIES], total[QUERIES];
    int kv_head = get_group_id(0);
    int first = get_group_id(1) * TOKENS, tokens = min(m - first, TOKENS);
    if (tokens <= 0)
        return;
    int queries = tokens * SHARED, end = 0;
    for (int t = 0; t < tokens; t++)
        end = max(end, positions[first + t] + 1);
    end = min(end, capacity);
    for (int i = 0; i < queries; i++) {
        top[i] = -INFINITY;
        total[i] = 0.0f;
        global const float *from = q + q_offset + (first + i / SHARED) * q_stride +
                                   (kv_head * SHARED + i % SHARED) * HEAD_DIM;
        for (int p = 0; p < HEAD_DIM / 16; p++) {
            vstore16(vload16(p, from) * scale, p, query + i * HEAD_DIM);
            vstore16((float16)0.0f, p, sum + i * HEAD_DIM);
        }
    }
    for (int row = 0; row < end; row += COLUMNS) {
        int rows = min(end - row, COLUMNS);
        size_t at = CACHE_ROW(kv_head, row, capacity);
        load_keys(k_cache, at, rows, keys);
        load_values(v_cache, at, rows, values);
        for (int i = 0; i < queries * PANEL; i++)
            vstore16((float16)0.0f, i, score);
        multiply_all(queries, query, HEAD_DIM, keys, COLUMNS, HEAD_DIM, score, COLUMNS);
        for (int i = 0; i < queries; i++)
            weigh(score + i * COLUMNS, min(positions[first + i / SHARED] + 1 - row, rows), top + i,
                  total + i, sum + i * HEAD_DIM);
        for (int column = 0; column < HEAD_DIM; column += PANEL * 16)
            multiply_all(queries, score, COLUMNS, values + column, HEAD_DIM, rows, sum + column,
                         HEAD_DIM);
    }
    for (int i = 0; i < queries; i++) {
        float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
        global float *to = y + y_offset + (first + i / SHARED) * y_stride +
                           (kv_head * SHARED + i % SHARED) * HEAD_DIM;
        for (int p = 0; p < HEAD_DIM / 16; p++)
            vstore16(vload16(p, sum + i * HEAD_DIM) * inverse, p, to);
    }
}
