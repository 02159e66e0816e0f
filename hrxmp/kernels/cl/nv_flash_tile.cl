// Causal attention of many rows of one head on the tensor cores: a work-group has 64 rows, each of its
// four warps 16, and takes the cache in tiles of T rows.
//
// Products are of halves. A float is two of them, high and low, and its product two or three: queries,
// weights and the rows of an f32 cache keep 22 bits so. An f16 cache is what it is.
//
// In the fragments of a product a lane has rows g and g + 8, and columns by t: see the names below.

#include "nv_form.h"
#include "cache.h"

#define TOKENS 64
#define STEPS (HEAD_DIM / 16)
#define COLUMNS (HEAD_DIM / 8)
// Words of a tile's rows: of k by cache row, of v by element. Eight rows, four words each, meet each
// bank once.
#define K_WORDS (HEAD_DIM / 2 + 4)
#define V_WORDS (T / 2 + 4)

typedef struct {
    uint k[T * K_WORDS], v[HEAD_DIM * V_WORDS];
} Tile;

// High and low halves of four values, two in a word.
typedef struct {
    uint2 high, low;
} Halves;

INLINE Halves halves4(float4 v) {
    uint2 high = {pack_halves(v.x, v.y), pack_halves(v.z, v.w)};
    float4 rest = v - (float4)(halves_of(high.x), halves_of(high.y));
    return (Halves){high, {pack_halves(rest.x, rest.y), pack_halves(rest.z, rest.w)}};
}

// Words of neighbouring cache rows become words of v: the same element of both.
INLINE uint lower_pair(uint first, uint second) { return (first & 0xffffu) | second << 16; }
INLINE uint upper_pair(uint first, uint second) { return first >> 16 | (second & 0xffff0000u); }

INLINE void put_v(uint2 first, uint2 second, local uint *v) {
    v[0] = lower_pair(first.x, second.x);
    v[V_WORDS] = upper_pair(first.x, second.x);
    v[2 * V_WORDS] = lower_pair(first.y, second.y);
    v[3 * V_WORDS] = upper_pair(first.y, second.y);
}

// Four elements of row `row`.
INLINE Halves load4(global const cached *cache, int row, int element) {
    global const cached *from = cache + (size_t)row * HEAD_DIM + element;
#if HALF_CACHE
    return (Halves){*(global const uint2 *)from, 0};
#else
    return halves4(vload4(0, from));
#endif
}

// Rows from `start` on; those past the last one are the last one again, and have no weight.
INLINE void load_tile(global const cached *k, global const cached *v, int start, int rows,
                      local Tile *high, local Tile *low) {
    for (int i = get_local_id(0); i < T * HEAD_DIM / 4; i += LX) {
        int r = i / (HEAD_DIM / 4), quad = i % (HEAD_DIM / 4);
        Halves four = load4(k, min(start + r, rows - 1), quad * 4);
        *(local uint2 *)(high->k + r * K_WORDS + quad * 2) = four.high;
        if (!HALF_CACHE)
            *(local uint2 *)(low->k + r * K_WORDS + quad * 2) = four.low;
    }
    for (int i = get_local_id(0); i < T / 2 * HEAD_DIM / 4; i += LX) {
        int pair = i % (T / 2), element = i / (T / 2) * 4, r = start + pair * 2;
        Halves first = load4(v, min(r, rows - 1), element);
        Halves second = load4(v, min(r + 1, rows - 1), element);
        put_v(first.high, second.high, high->v + element * V_WORDS + pair);
        if (!HALF_CACHE)
            put_v(first.low, second.low, low->v + element * V_WORDS + pair);
    }
}

// sum + a b, of a's high and low halves.
INLINE float4 multiply(uint4 a_high, uint4 a_low, local const uint *b_high, local const uint *b_low,
                       float4 sum, local uint *scratch) {
    uint2 b = {b_high[0], b_high[4]};
    sum = multiply_halves(a_high, b, sum, scratch);
    sum = multiply_halves(a_low, b, sum, scratch);
    if (!HALF_CACHE)
        sum = multiply_halves(a_high, (uint2)(b_low[0], b_low[4]), sum, scratch);
    return sum;
}

INLINE float2 over_four_lanes(float2 v, bool highest, local float *scratch) {
    for (int mask = 1; mask < 4; mask *= 2) {
        float2 other = {lane_xor(v.x, mask, scratch), lane_xor(v.y, mask, scratch)};
        v = highest ? fmax(v, other) : v + other;
    }
    return v;
}

KERNEL nv_flash_tile(int m, int capacity, int q_stride, int q_offset, int y_stride, int y_offset,
                     float scale, global const float *q, global const int *positions,
                     global const cached *k_cache, global const cached *v_cache, global float *y) {
    local Tile tiles[HALF_CACHE ? 1 : 2] __attribute__((aligned(16)));
    local int seen[TOKENS];
#if PTX
    local uint *scratch = 0;
#else
    local uint scratch[6 * LX];
#endif
    local Tile *low = tiles + !HALF_CACHE;
    local float *exchange = (local float *)scratch;
    int item = get_local_id(0), lane = item % WARP, g = lane / 4, t = lane % 4;
    int token = (get_num_groups(0) - 1 - get_group_id(0)) * TOKENS;  // the longest ones first
    int head = get_group_id(1), own = item / WARP * 16 + g;
    if (token >= m)
        return;
    for (int i = item; i < TOKENS; i += LX)
        seen[i] = token + i < m ? clamp(positions[token + i] + 1, 0, capacity) : 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    int rows = 0, upper = seen[own], lower = seen[own + 8];
    for (int i = 0; i < TOKENS; i++)
        rows = max(rows, seen[i]);

    uint4 q_high[STEPS], q_low[STEPS];
    q += q_offset + head * HEAD_DIM;
    global const float *q_upper = q + min(token + own, m - 1) * q_stride;
    global const float *q_lower = q + min(token + own + 8, m - 1) * q_stride;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        int at = s * 16 + t * 2;
        float scaled = scale * M_LOG2E_F;  // weights are powers of two
        float4 near = {vload2(0, q_upper + at), vload2(0, q_lower + at)};
        float4 far = {vload2(0, q_upper + at + 8), vload2(0, q_lower + at + 8)};
        Halves first = halves4(scaled * near), second = halves4(scaled * far);
        q_high[s] = (uint4)(first.high, second.high);
        q_low[s] = (uint4)(first.low, second.low);
    }

    size_t first = CACHE_ROW(head / SHARED, 0, capacity);
    float2 top = -INFINITY, total = 0.0f;  // of the rows g and g + 8
    float4 sums[COLUMNS];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
        sums[n] = 0.0f;
    for (int start = 0; start < rows; start += T) {
        load_tile(k_cache + first, v_cache + first, start, rows, tiles, low);
        barrier(CLK_LOCAL_MEM_FENCE);
        float4 scores[T / 8];
        float2 next = top;
#pragma unroll
        for (int j = 0; j < T / 8; j++) {
            scores[j] = 0.0f;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                int at = (j * 8 + g) * K_WORDS + s * 8 + t;
                scores[j] = multiply(q_high[s], q_low[s], tiles->k + at, low->k + at, scores[j],
                                     scratch);
            }
            int column = start + j * 8 + t * 2;
            scores[j].x = column < upper ? scores[j].x : -INFINITY;
            scores[j].y = column + 1 < upper ? scores[j].y : -INFINITY;
            scores[j].z = column < lower ? scores[j].z : -INFINITY;
            scores[j].w = column + 1 < lower ? scores[j].w : -INFINITY;
            float2 highest = fmax(scores[j].xz, scores[j].yw);
            next = fmax(next, highest);
        }
        next = over_four_lanes(next, true, exchange);
        float2 base = {next.x == -INFINITY ? 0.0f : next.x, next.y == -INFINITY ? 0.0f : next.y};
        float2 keep = {power_of_two(top.x - base.x), power_of_two(top.y - base.y)};
        top = next;
        total *= keep;
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
            sums[n] *= (float4)(keep.xx, keep.yy);
#pragma unroll
        for (int s = 0; s < T / 16; s++) {
            Halves parts[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float4 score = scores[2 * s + j] - (float4)(base.xx, base.yy);
                float4 weight = {power_of_two(score.x), power_of_two(score.y),
                                 power_of_two(score.z), power_of_two(score.w)};
                total += weight.xz + weight.yw;
                parts[j] = halves4(weight);
            }
            uint4 high = {parts[0].high, parts[1].high}, rest = {parts[0].low, parts[1].low};
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                int at = (n * 8 + g) * V_WORDS + s * 8 + t;
                sums[n] = multiply(high, rest, tiles->v + at, low->v + at, sums[n], scratch);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    total = over_four_lanes(total, false, exchange);
    float2 factor = {total.x > 0.0f ? 1.0f / total.x : 0.0f,  // a row may see nothing
                     total.y > 0.0f ? 1.0f / total.y : 0.0f};
    y += y_offset + head * HEAD_DIM + t * 2;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
        if (token + own < m)
            vstore2(sums[n].xy * factor.x, 0, y + (token + own) * y_stride + n * 8);
        if (token + own + 8 < m)
            vstore2(sums[n].zw * factor.y, 0, y + (token + own + 8) * y_stride + n * 8);
    }
}
