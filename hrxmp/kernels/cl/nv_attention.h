// Causal attention of one query head of one row by a work-group, over the cache in tiles of TILE rows.
// Some groups may share a head, a chunk of its rows each: the last one to finish puts their sums
// together.
//
// With ROPE (one row only) q and k are rotated here, k and v are stored in the caches, and a group
// takes the newest row from its own copies: no other group's store has to be seen. Eight lanes share
// a cache row for its score; then each item adds up four elements of every SLICES-th row of v.

#ifndef NV_ATTENTION_H
#define NV_ATTENTION_H
#include "nv_form.h"
#include "cache.h"
#include "nv_grid.h"
#include "rope.h"

#define TILE 1024
#define SCORE_LANES 8
#define QUADS (HEAD_DIM / 4)
#define SLICES (LX / QUADS)
#define CHUNK_ROWS 256         // fewer are not worth a group of their own
#define PARTIAL (HEAD_DIM + 2)  // floats of a chunk: sums, the highest score, the total of the weights

#if HALF_CACHE
#define cache_load4(index, p) vload_half4(0, (p) + (index))
#else
#define cache_load4(index, p) vload4(0, (p) + (index))
#endif

// A value as the cache will have it.
INLINE float as_cached(float value) {
#if HALF_CACHE
    ushort stored;  // `half` itself is no type of every compiler
    cache_store(value, 0, (half *)&stored);
    return cache_load(0, (half *)&stored);
#else
    return value;
#endif
}

typedef struct {
    global const cached *k, *v;  // of this head's first row
    int rows, newest;            // rows to see; the row that lies in `fresh`, or -1
    local const float *query, *fresh;
} Seen;

// Scores of rows start..start + count - 1; every item gets the highest.
INLINE float score_tile(Seen seen, int start, int count, local float *scores,
                        local float *scratch) {
    int lane = get_local_id(0) % SCORE_LANES, row = get_local_id(0) / SCORE_LANES;
    float top = -INFINITY;
#pragma unroll 4
    for (int pass = 0; pass < count; pass += LX / SCORE_LANES) {
        int at = pass + row;
        float score = 0.0f;
        if (at < count && start + at == seen.newest) {
            for (int i = lane * 4; i < HEAD_DIM; i += SCORE_LANES * 4)
                score += dot(vload4(0, seen.query + i), vload4(0, seen.fresh + i));
        } else if (at < count) {
            global const cached *k = seen.k + (size_t)(start + at) * HEAD_DIM;
            for (int i = lane * 4; i < HEAD_DIM; i += SCORE_LANES * 4)
                score += dot(vload4(0, seen.query + i), cache_load4(i, k));
        }
        for (int mask = 1; mask < SCORE_LANES; mask *= 2)
            score += lane_xor(score, mask, scratch);
        if (at < count) {
            top = fmax(top, score);
            if (lane == 0)
                scores[at] = score;
        }
    }
    return group_top(top, scratch);
}

// sum += weights times rows of v, this item's four elements of its slice.
INLINE float4 add_tile(Seen seen, int start, int count, local const float *scores, float4 sum) {
    int quad = get_local_id(0) % QUADS * 4, slice = get_local_id(0) / QUADS;
#pragma unroll 4
    for (int pass = 0; pass < count; pass += SLICES) {
        int at = pass + slice;
        if (slice < SLICES && at < count) {
            bool fresh = start + at == seen.newest;
            global const cached *v = seen.v + (size_t)(start + at) * HEAD_DIM;
            float4 value = fresh ? vload4(0, seen.fresh + HEAD_DIM + quad) : cache_load4(quad, v);
            sum += scores[at] * value;
        }
    }
    return sum;
}

// Local memory of a group.
typedef struct {
    float query[HEAD_DIM], fresh[2 * HEAD_DIM], scores[TILE];  // fresh: the newest k and v
    float4 sums[LX];
    int last;  // whether this group is the last one of its head
} Attending;

// Which of a head's chunks a group has; where the sums of all lie, and how many of them are there:
// zero before and after.
typedef struct {
    int chunk, chunks;
    global float *partials;
    volatile global uint *arrived;
} Split;

// y from the sums of all chunks, by the last group that has one.
INLINE void combine(Split split, float top, float total, local Attending *own, global float *y) {
    int item = get_local_id(0);
    global float *mine = split.partials + split.chunk * PARTIAL;
    if (item < HEAD_DIM)
        mine[item] = ((local const float *)own->sums)[item];
    if (item == 0) {
        mine[HEAD_DIM] = top;
        mine[HEAD_DIM + 1] = total;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0)
        own->last = arrive(split.arrived) + 1 == split.chunks;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (!own->last)
        return;
    float highest = -INFINITY, weights = 0.0f, sum = 0.0f;
    for (int chunk = 0; chunk < split.chunks; chunk++)
        highest = fmax(highest, split.partials[chunk * PARTIAL + HEAD_DIM]);
    for (int chunk = 0; chunk < split.chunks; chunk++) {
        global const float *part = split.partials + chunk * PARTIAL;
        float weight = exp(part[HEAD_DIM] - highest);
        weights += weight * part[HEAD_DIM + 1];
        sum += item < HEAD_DIM ? weight * part[item] : 0.0f;
    }
    if (item < HEAD_DIM)
        y[item] = sum / weights;
    if (item == 0)
        *split.arrived = 0;
}

INLINE void attend(Seen seen, Split split, local Attending *own, local float *scratch,
                   global float *y) {
    int item = get_local_id(0);
    local float *scores = own->scores;
    local float4 *sums = own->sums;
    float top = -INFINITY, total = 0.0f;
    float4 sum = 0.0f;
    for (int start = 0; start < seen.rows; start += TILE) {
        int count = min(TILE, seen.rows - start);
        float next = fmax(top, score_tile(seen, start, count, scores, scratch));
        float keep = top == -INFINITY ? 0.0f : exp(top - next), part = 0.0f;
        for (int pass = 0; pass < count; pass += LX) {
            if (pass + item < count) {
                float weight = exp(scores[pass + item] - next);
                scores[pass + item] = weight;
                part += weight;
            }
        }
        total = total * keep + group_total(part, scratch);
        sum = add_tile(seen, start, count, scores, sum * keep);
        top = next;
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    sums[item] = item / QUADS < SLICES ? sum : 0.0f;
    for (int left = SLICES; left > 1; left = (left + 1) / 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        int other = item + (left + 1) / 2 * QUADS;
        if (other < left * QUADS)
            sums[item] += sums[other];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (split.chunks > 1)
        combine(split, top, total, own, y);
    else if (item < HEAD_DIM)
        y[item] = total > 0.0f ? ((local const float *)sums)[item] / total : 0.0f;
}

// The head of q, and the newest k and v, from rows of q, k, v side by side; q and k rotated.
INLINE void take_heads(global const float *q, int head, int position, float freq_base,
                       float freq_scale, global const float *factors, local Attending *own) {
    global const float *k = q + (HEADS + head / SHARED) * HEAD_DIM;
    for (int i = get_local_id(0); i < HEAD_DIM; i += LX) {
        own->query[i] = q[head * HEAD_DIM + i];
        own->fresh[i] = k[i];
        own->fresh[HEAD_DIM + i] = k[KV_WIDTH + i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = get_local_id(0); i < 2 * PAIRS; i += LX) {
        local float *x = i < PAIRS ? own->query : own->fresh;
        float angle = angle_of(i % PAIRS, position, freq_base, freq_scale, factors);
        float c = cos(angle), s = sin(angle);
        float a = x[FIRST_OF(i % PAIRS)], b = x[SECOND_OF(i % PAIRS)];
        x[FIRST_OF(i % PAIRS)] = a * c - b * s;
        x[SECOND_OF(i % PAIRS)] = a * s + b * c;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

INLINE void attend_head(int head, int position, int capacity, float scale, float freq_base,
                        float freq_scale, global const float *q, global const float *factors,
                        global cached *k_cache, global cached *v_cache, global float *y,
                        Split split, local Attending *own, local float *scratch) {
    local float *query = own->query, *fresh = own->fresh;
    int item = get_local_id(0), kv_head = head / SHARED, newest = -1;
#if ROPE
    take_heads(q, head, position, freq_base, freq_scale, factors, own);
    for (int i = item; i < 2 * HEAD_DIM; i += LX)
        fresh[i] = as_cached(fresh[i]);
    bool inside = position >= 0 && position < capacity;
    newest = position;
    inside &= head % SHARED == 0 && split.chunk == 0;
    for (int i = item; i < 2 * HEAD_DIM && inside; i += LX)
        cache_store(fresh[i], CACHE_ROW(kv_head, position, capacity) + i % HEAD_DIM,
                    i < HEAD_DIM ? k_cache : v_cache);
#else
    for (int i = item; i < HEAD_DIM; i += LX)
        query[i] = q[head * HEAD_DIM + i];
#endif
    for (int i = item; i < HEAD_DIM; i += LX)
        query[i] *= scale;
    barrier(CLK_LOCAL_MEM_FENCE);
    int rows = min(position + 1, capacity), chunk_rows = (rows + split.chunks - 1) / split.chunks;
    int start = split.chunk * chunk_rows;
    size_t first = CACHE_ROW(kv_head, start, capacity);
    Seen seen = {k_cache + first, v_cache + first, min(chunk_rows, rows - start),
                 newest - start,  query,           fresh};
    attend(seen, split, own, scratch, y + head * HEAD_DIM);
}
#endif
