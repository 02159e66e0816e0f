// A whole transformer layer for one row, on CPU devices: what five launches do (norm and q, k, v;
// rope, cache rows and attention; output and residual; norm, gate, up and swiglu; down and residual),
// as phases. Attention over a long context is split over cache rows as well.

#ifndef LAYER_H
#define LAYER_H

#define NQ (HEADS * HEAD_DIM)
#define NK (KV_HEADS * HEAD_DIM)
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
#define K_MAX MAX2(MAX2(HIDDEN, FFN), NQ)
#include "attend.h"
#include "dot.h"
#include "phases.h"
#include "rope.h"

#define TYPE(name) PASTE(TYPE_, name)
#define GROUPS(n) (((n) + 15) / 16)
#define QKV_GROUPS (GROUPS(NQ) + 2 * GROUPS(NK))
// Part `part` of PARTS_A_PHASE of `count` things begins here.
#define BEGIN(count, part) ((count) * (part) / PARTS_A_PHASE)
#define SPLIT_ROWS 256  // a split of the cache is no shorter

enum { QKV, ATTENTION, OUTPUT, GATE_UP, DOWN, PHASES };

// Attention of one head over one split.
typedef struct {
    float sum[HEAD_DIM];
    float top, total, unused[14];
} Partial;

// Where the layer's intermediate values lie in its scratch memory.
typedef struct {
    float qkv[NQ + 2 * NK];
    Partial partial[HEADS * SPLITS];
    float middle[HIDDEN];
    float gated[FFN];
} Scratch;

// Row groups begin..end of one weight matrix times the activations; those it has not are left out.
// At `next` lie the weights that this work-group reads afterwards.
inline void multiply_rows(const int type, const int k, const int n, global const uchar *w,
                          int begin, int end, global const uchar *next, local const Activations *x,
                          global const float *residual, global float *y) {
    end = min(end, GROUPS(n));
    for (int group = max(begin, 0); group < end; group++) {
        global const uchar *at = row_group(type, k, w, group);
        float16 value =
            dot16(type, k, at, group + 1 < end ? at + GROUP_BYTES(type, k) : next, x);
        if (residual)
            value += load16(residual + group * 16, n - group * 16);
        store16(value, y + group * 16, n - group * 16);
    }
}

// What a work-group will probably claim: a part of each phase, and more in turn with the others.
// Weights are asked for before they are claimed, and before their phase may begin.
#define FIRST ((int)get_group_id(0))
#define AFTER(part) ((part) + (int)get_num_groups(0))
#define IS_PART(part) ((part) < PARTS_A_PHASE)
#define PART_OF(type, k, n, w, part) row_group(type, k, w, BEGIN(GROUPS(n), part))

inline void turn_head(local float *x, local const float *cosines, local const float *sines) {
    for (int i = 0; i < PAIRS; i++) {
        float a = x[FIRST_OF(i)], b = x[SECOND_OF(i)];
        x[FIRST_OF(i)] = a * cosines[i] - b * sines[i];
        x[SECOND_OF(i)] = a * sines[i] + b * cosines[i];
    }
}

inline void copy_head(local float *to, global const float *from) {
    for (int p = 0; p < PARTS; p++)
        vstore16(vload16(p, from), p, to);
}

// This row's key and value of one head into the caches.
inline void store_row(int kv_head, int position, int capacity, global const float *qkv,
                      local float *key, local const float *cosines, local const float *sines,
                      global cached *k_cache, global cached *v_cache) {
    size_t row = CACHE_ROW(kv_head, position, capacity);
    global const float *value = qkv + NQ + NK + kv_head * HEAD_DIM;
    copy_head(key, qkv + NQ + kv_head * HEAD_DIM);
    turn_head(key, cosines, sines);
    for (int i = 0; i < HEAD_DIM; i++) {
        cache_store(key[i], row + i, k_cache);
        cache_store(value[i], row + i, v_cache);
    }
}

inline int splits_of(int rows) { return clamp(rows / SPLIT_ROWS, 1, SPLITS); }

// The attention of a row of query heads, from its partial results, as activations.
inline void read_attention(local Activations *to, global const Partial *partial, int splits) {
    for (int head = 0; head < HEADS; head++) {
        global const Partial *p = partial + head * SPLITS;
        float top = -INFINITY, total = 0.0f, weight[SPLITS];
        for (int s = 0; s < splits; s++)
            top = fmax(top, p[s].top);
        for (int s = 0; s < splits; s++) {
            weight[s] = p[s].total > 0.0f ? exp(p[s].top - top) : 0.0f;
            total += weight[s] * p[s].total;
        }
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        for (int i = 0; i < HEAD_DIM; i += 32) {
            float16 a = 0.0f, b = 0.0f;
            for (int s = 0; s < splits; s++) {
                a += weight[s] * vload16(0, p[s].sum + i);
                b += weight[s] * vload16(0, p[s].sum + i + 16);
            }
            put_block(TYPE(WO), to, head * HEAD_DIM + i, a * inverse, b * inverse);
        }
    }
}

// What a layer reads and writes. A table of these is made of addresses (kernels/layer.py: _TABLE).
typedef struct {
    global const float *x, *attn_norm;
    global const uchar *wq, *wk, *wv, *wo;
    global const float *ffn_norm;
    global const uchar *wg, *wu, *wd;
    global const int *positions;
    global const float *factors;
    global cached *k_cache, *v_cache;
    global Scratch *scratch;
    global float *y;
} Layer;

// Row group `group` of q, k and v, one after the other.
inline global const uchar *qkv_group(const Layer l, int group) {
    if (group < GROUPS(NQ))
        return row_group(TYPE(WQ), HIDDEN, l.wq, group);
    if (group < GROUPS(NQ) + GROUPS(NK))
        return row_group(TYPE(WK), HIDDEN, l.wk, group - GROUPS(NQ));
    return row_group(TYPE(WV), HIDDEN, l.wv, group - GROUPS(NQ) - GROUPS(NK));
}

// A work-group's own memory.
typedef struct {
    Activations row;
    Attention attention;
    float cosines[PAIRS], sines[PAIRS], key[HEAD_DIM];
} Desk;

inline void project(const Layer l, float eps, local Activations *row, global atomic_int *state) {
    int part = claim(state, QKV);
    if (IS_PART(part))
        read_activations(TYPE(WQ), HIDDEN, true, row, l.x, l.attn_norm, eps);
    for (; IS_PART(part); part = claim(state, QKV)) {
        int begin = BEGIN(QKV_GROUPS, part), end = BEGIN(QKV_GROUPS, part + 1);
        global const uchar *next = IS_PART(AFTER(part))
                                       ? qkv_group(l, BEGIN(QKV_GROUPS, AFTER(part)))
                                       : PART_OF(TYPE(WO), NQ, HIDDEN, l.wo, FIRST);
        global float *to = l.scratch->qkv;
        multiply_rows(TYPE(WQ), HIDDEN, NQ, l.wq, begin, end, end > GROUPS(NQ) ? l.wk : next, row,
                      0, to);
        begin -= GROUPS(NQ), end -= GROUPS(NQ);
        multiply_rows(TYPE(WK), HIDDEN, NK, l.wk, begin, end, end > GROUPS(NK) ? l.wv : next, row,
                      0, to + NQ);
        begin -= GROUPS(NK), end -= GROUPS(NK);
        multiply_rows(TYPE(WV), HIDDEN, NK, l.wv, begin, end, next, row, 0, to + NQ + NK);
        finish(state, QKV);
    }
    await(state, QKV, PARTS_A_PHASE);
}

inline void attend_cache(const Layer l, int capacity, int rows, float scale, local Desk *desk,
                         global atomic_int *state) {
    local Attention *attention = &desk->attention;
    int position = l.positions[0], splits = splits_of(rows), part = claim(state, ATTENTION);
    for (; part < KV_HEADS * splits; part = claim(state, ATTENTION)) {
        // The last split first: it has the row to store, and the rest of the rounding.
        int kv_head = part % KV_HEADS, split = splits - 1 - part / KV_HEADS;
        for (int h = 0; h < SHARED; h++) {
            copy_head(attention->query[h], l.scratch->qkv + (kv_head * SHARED + h) * HEAD_DIM);
            turn_head(attention->query[h], desk->cosines, desk->sines);
            for (int p = 0; p < PARTS; p++)
                vstore16(vload16(p, attention->query[h]) * scale, p, attention->query[h]);
        }
        if (split == splits - 1 && position >= 0 && position < capacity)
            store_row(kv_head, position, capacity, l.scratch->qkv, desk->key, desk->cosines,
                      desk->sines, l.k_cache, l.v_cache);
        attend_all(attention, kv_head, capacity, l.k_cache, l.v_cache, rows * split / splits,
                   rows * (split + 1) / splits);
        for (int h = 0; h < SHARED; h++) {
            global Partial *to = l.scratch->partial + (kv_head * SHARED + h) * SPLITS + split;
            for (int p = 0; p < PARTS; p++)
                vstore16(vload16(p, attention->sum[h]), p, to->sum);
            to->top = attention->top[h];
            to->total = attention->total[h];
        }
        finish(state, ATTENTION);
    }
    await(state, ATTENTION, KV_HEADS * splits);
}

inline void add_output(const Layer l, int rows, local Activations *row, global atomic_int *state) {
    int part = claim(state, OUTPUT);
    if (IS_PART(part))
        read_attention(row, l.scratch->partial, splits_of(rows));
    for (; IS_PART(part); part = claim(state, OUTPUT)) {
        int begin = BEGIN(GROUPS(HIDDEN), part), end = BEGIN(GROUPS(HIDDEN), part + 1);
        global const uchar *next = IS_PART(AFTER(part))
                                       ? PART_OF(TYPE(WO), NQ, HIDDEN, l.wo, AFTER(part))
                                       : PART_OF(TYPE(WG), HIDDEN, FFN, l.wg, FIRST);
        multiply_rows(TYPE(WO), NQ, HIDDEN, l.wo, begin, end, next, row, l.x, l.scratch->middle);
        finish(state, OUTPUT);
    }
    await(state, OUTPUT, PARTS_A_PHASE);
}

inline void gate_and_up(const Layer l, float eps, local Activations *row,
                        global atomic_int *state) {
    int part = claim(state, GATE_UP);
    if (IS_PART(part))
        read_activations(TYPE(WG), HIDDEN, true, row, l.scratch->middle, l.ffn_norm, eps);
    for (; IS_PART(part); part = claim(state, GATE_UP)) {
        int end = BEGIN(GROUPS(FFN), part + 1);
        for (int group = BEGIN(GROUPS(FFN), part); group < end; group++) {
            int next = group + 1 < end ? group + 1 : BEGIN(GROUPS(FFN), AFTER(part));
            global const uchar *next_gate = row_group(TYPE(WG), HIDDEN, l.wg, next);
            global const uchar *next_up = row_group(TYPE(WU), HIDDEN, l.wu, next);
            if (next >= GROUPS(FFN)) {
                next_gate = PART_OF(TYPE(WD), FFN, HIDDEN, l.wd, FIRST);
                next_up = next_gate + GROUP_BYTES(TYPE(WG), HIDDEN);
            }
            float16 gate = dot16(TYPE(WG), HIDDEN, row_group(TYPE(WG), HIDDEN, l.wg, group),
                                 next_gate, row);
            float16 up = dot16(TYPE(WU), HIDDEN, row_group(TYPE(WU), HIDDEN, l.wu, group),
                               next_up, row);
            store16(swiglu16(gate, up), l.scratch->gated + group * 16, FFN - group * 16);
        }
        finish(state, GATE_UP);
    }
    await(state, GATE_UP, PARTS_A_PHASE);
}

inline void add_down(const Layer l, global const uchar *then, local Activations *row,
                     global atomic_int *state) {
    int part = claim(state, DOWN);
    if (IS_PART(part))
        read_activations(TYPE(WD), FFN, false, row, l.scratch->gated, 0, 0.0f);
    for (; IS_PART(part); part = claim(state, DOWN)) {
        int begin = BEGIN(GROUPS(HIDDEN), part), end = BEGIN(GROUPS(HIDDEN), part + 1);
        global const uchar *next =
            IS_PART(AFTER(part)) ? PART_OF(TYPE(WD), FFN, HIDDEN, l.wd, AFTER(part)) : then;
        multiply_rows(TYPE(WD), FFN, HIDDEN, l.wd, begin, end, next, row, l.scratch->middle, l.y);
        finish(state, DOWN);
    }
    await(state, DOWN, PARTS_A_PHASE);
}

// One layer, with the counters of its five phases; when it returns all of the layer is done. At
// `then` lie the weights that this work-group reads afterwards.
inline void run_layer(const Layer l, global const uchar *then, int capacity, float eps, float scale,
                      local Desk *desk, global atomic_int *state) {
    int rows = min(l.positions[0] + 1, capacity);
    project(l, eps, &desk->row, state);
    attend_cache(l, capacity, rows, scale, desk, state);
    add_output(l, rows, &desk->row, state);
    gate_and_up(l, eps, &desk->row, state);
    add_down(l, then, &desk->row, state);
}
#endif
