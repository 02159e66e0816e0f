// Attention of the query heads that share one key head, for one row, by one work-item with explicit
// vectors: blocks of ROWS cache rows, with a running maximum between blocks.

#ifndef ATTEND_H
#define ATTEND_H
#include "cache.h"
#include "vector.h"

#define ROWS 256
#define FETCH_ROWS 32  // how far ahead cache rows are asked for
#define PARTS (HEAD_DIM / 16)
// Query heads whose sums fit in registers together.
#define TOGETHER (SHARED * PARTS <= 16 ? SHARED : PARTS <= 4 ? 4 : PARTS <= 8 ? 2 : 1)

typedef struct {
    float query[SHARED][HEAD_DIM];
    float score[SHARED][ROWS];
    float sum[SHARED][HEAD_DIM];
    float top[SHARED], total[SHARED];
} Attention;

// Sums of halves: [a | b] of vectors whose elements are to be added up 16, 8, 4 or 2 at a time.
#define HALVE(a, b, LOW_HALVES, HIGH_HALVES)                                                       \
    (__builtin_shufflevector(a, b, LOW_HALVES) + __builtin_shufflevector(a, b, HIGH_HALVES))
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define LOW2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define HIGH2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define LOW1 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define HIGH1 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31

// Four elements of each of four vectors, in their order, that add up to what the vectors did.
inline float16 quarter(float16 a, float16 b, float16 c, float16 d) {
    float16 first = HALVE(a, b, LOW8, HIGH8), second = HALVE(c, d, LOW8, HIGH8);
    return HALVE(first, second, LOW4, HIGH4);
}

// The sums of 16 vectors, in their order, from what `quarter` made of four times four.
inline float16 last_sums(float16 a, float16 b, float16 c, float16 d) {
    float16 first = HALVE(a, b, LOW2, HIGH2), second = HALVE(c, d, LOW2, HIGH2);
    return HALVE(first, second, LOW1, HIGH1);
}

// Scores of 16 cache rows from `row` for `count` heads; rows that are not there repeat the last.
inline void score16(const int count, local Attention *a, int head, global const cached *keys,
                    int row, int last, int to) {
    float16 fours[TOGETHER][4];
    // Not unrolled: it gains nothing, and takes Intel's compiler ten times as long.
    for (int four = 0; four < 4; four++) {
        float16 product[TOGETHER][4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            global const cached *key = keys + (size_t)min(row + four * 4 + r, last) * HEAD_DIM;
            fetch_ahead(key + FETCH_ROWS * HEAD_DIM, sizeof(cached) * HEAD_DIM);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                float16 part = cache_load16(p, key);
#pragma unroll
                for (int h = 0; h < count; h++) {
                    float16 query = vload16(p, a->query[head + h]);
                    product[h][r] = p ? mad(part, query, product[h][r]) : part * query;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < count; h++)
            fours[h][four] = quarter(product[h][0], product[h][1], product[h][2], product[h][3]);
    }
#pragma unroll
    for (int h = 0; h < count; h++)
        vstore16(last_sums(fours[h][0], fours[h][1], fours[h][2], fours[h][3]), 0,
                 a->score[head + h] + to);
}

// Scores -> weights; the sums so far shrink to the new maximum.
inline void weigh(local Attention *a, int head, int rows) {
    float16 highest = -INFINITY;
    for (int r = 0; r < rows; r += 16) {
        float16 score = vload16(0, a->score[head] + r);
        int16 index = r + (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        score = select((float16)-INFINITY, score, index < rows);
        vstore16(score, 0, a->score[head] + r);
        highest = fmax(highest, score);
    }
    float top = fmax(max16(highest), a->top[head]), keep = exp(a->top[head] - top);
    float16 total = 0.0f;
    for (int r = 0; r < rows; r += 16) {
        float16 weight = exp16(vload16(0, a->score[head] + r) - top);
        vstore16(weight, 0, a->score[head] + r);
        total += weight;
    }
    a->total[head] = a->total[head] * keep + sum16(total);
    a->top[head] = top;
    for (int p = 0; p < PARTS; p++)
        vstore16(vload16(p, a->sum[head]) * keep, p, a->sum[head]);
}

// sum[h] += weights * values for `count` heads.
inline void add_values(const int count, local Attention *a, int head,
                       global const cached *values, int rows) {
    float16 sum[TOGETHER][PARTS];
#pragma unroll
    for (int h = 0; h < count; h++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            sum[h][p] = vload16(p, a->sum[head + h]);
    for (int r = 0; r < rows; r++) {
        global const cached *value = values + (size_t)r * HEAD_DIM;
        fetch_ahead(value + FETCH_ROWS * HEAD_DIM, sizeof(cached) * HEAD_DIM);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            float16 part = cache_load16(p, value);
#pragma unroll
            for (int h = 0; h < count; h++)
                sum[h][p] = mad((float16)a->score[head + h][r], part, sum[h][p]);
        }
    }
#pragma unroll
    for (int h = 0; h < count; h++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
            vstore16(sum[h][p], p, a->sum[head + h]);
}

// `count` heads from `head` over rows first..end of their key head; a->query must be scaled already.
inline void attend(const int count, local Attention *a, int head, global const cached *keys,
                   global const cached *values, int first, int end) {
    for (int row = first; row < end; row += ROWS) {
        int rows = min(end - row, ROWS);
        for (int r = 0; r < rows; r += 16)
            score16(count, a, head, keys, row + r, end - 1, r);
        for (int h = 0; h < count; h++)
            weigh(a, head + h, rows);
        add_values(count, a, head, values + (size_t)row * HEAD_DIM, rows);
    }
}

inline void attend_all(local Attention *a, int kv_head, int capacity, global const cached *k_cache,
                       global const cached *v_cache, int first, int end) {
    for (int h = 0; h < SHARED; h++) {
        a->top[h] = -INFINITY;
        a->total[h] = 0.0f;
        for (int i = 0; i < HEAD_DIM; i++)
            a->sum[h][i] = 0.0f;
    }
    k_cache += CACHE_ROW(kv_head, 0, capacity);
    v_cache += CACHE_ROW(kv_head, 0, capacity);
    int head = 0;
    for (; head + TOGETHER <= SHARED; head += TOGETHER)
        attend(TOGETHER, a, head, k_cache, v_cache, first, end);
#if SHARED > 1
    for (; head < SHARED; head++)
        attend(1, a, head, k_cache, v_cache, first, end);
#endif
}
#endif
