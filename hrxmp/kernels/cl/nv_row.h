// A row of x in local memory, in the form in which weights multiply it.
//
// For quantised weights: 16-bit integers, a scale for each 32 elements, so that products are exact
// integer sums: x = scale * (256 * high + low), both signed bytes. With them the sums of each 16 x.
// For f16 and f32 weights: floats.

#ifndef NV_ROW_H
#define NV_ROW_H
#include "nv_form.h"

#define TOP_QUANT 32512.0f  // 127 * 256: its high byte is still a signed one

// The planes of high and of low bytes have a gap after each 64: lanes that read 64 bytes apart meet
// each bank once. In global memory there is no gap.
#define GAP 16
#define PLANE_BYTES(k, gap) ((k) + ((k) + 63) / 64 * (gap))
#define BYTE_OF(element, gap) ((element) + (element) / 64 * (gap))

// Dwords of a row of k elements.
#define PACKED_WORDS(k, gap) (PLANE_BYTES(k, gap) / 2 + (k) / 32 + (k) / 16)
#define ROW_WORDS(k, packed) ((packed) ? PACKED_WORDS(k, GAP) : (k))

// The same in global memory, from row to row.
#define PACKED_STRIDE(k) ((PACKED_WORDS(k, 0) + 3) / 4 * 4)

typedef struct {
    uint4 high, low;
    float scale, sum;
} Run;  // 16 elements of x

INLINE uint bytes_of(int4 v) {
    return (v.x & 255) | (v.y & 255) << 8 | (v.z & 255) << 16 | (uint)v.w << 24;
}

INLINE Run run_at(local const uint *row, int element, int k) {
    local const float *scales = (local const float *)(row + PLANE_BYTES(k, GAP) / 2);
    local const float *sums = scales + k / 32;
    local const uint *at = row + BYTE_OF(element, GAP) / 4;
    Run run;
    run.high = *(local const uint4 *)at;
    run.low = *(local const uint4 *)(at + PLANE_BYTES(k, GAP) / 4);
    run.scale = scales[element / 32];
    run.sum = sums[element / 16];
    return run;
}

typedef struct {
    uint4 high0, high1, low0, low1;
    float scale, sum0, sum1;
} Block;  // 32 elements of x, as two runs

INLINE Block block_at(local const uint *row, int element, int k) {
    Run first = run_at(row, element, k), second = run_at(row, element + 16, k);
    return (Block){first.high, second.high, first.low, second.low,
                   first.scale, first.sum, second.sum};
}

INLINE int dot16(uint4 a, uint4 b, int c) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, c))));
}

INLINE float run_dot(uint4 weights, float scale, float add, Run x) {
    int high = dot4(weights.x, x.high.x, dot4(weights.y, x.high.y, 0));
    int low = dot4(weights.x, x.low.x, dot4(weights.y, x.low.y, 0));
    high = dot4(weights.z, x.high.z, dot4(weights.w, x.high.w, high));
    low = dot4(weights.z, x.low.z, dot4(weights.w, x.low.w, low));
    return scale * (x.scale * (float)(high * 256 + low)) + add * x.sum;
}

// Four neighbouring elements of one item become their part of the row; eight items make a block.
INLINE void put_packed(local uint *row, float4 v, int element, int k, int gap,
                       local float *scratch) {
    float4 size = fabs(v);
    float top = fmax(fmax(size.x, size.y), fmax(size.z, size.w));
    for (int mask = 1; mask < 8; mask *= 2)
        top = fmax(top, lane_xor(top, mask, scratch));
    int4 q = convert_int4_rte(v * (top > 0.0f ? TOP_QUANT / top : 0.0f));
    float sum = (float)(q.x + q.y + q.z + q.w);
    for (int mask = 1; mask < 4; mask *= 2)
        sum += lane_xor(sum, mask, scratch);
    if (element >= k)
        return;
    int4 high = (q + 128) >> 8;
    local float *scales = (local float *)(row + PLANE_BYTES(k, gap) / 2), *sums = scales + k / 32;
    local uint *at = row + BYTE_OF(element, gap) / 4;
    at[0] = bytes_of(high);
    at[PLANE_BYTES(k, gap) / 4] = bytes_of(q - (high << 8));
    scales[element / 32] = top / TOP_QUANT;
    sums[element / 16] = sum * (top / TOP_QUANT);
}
#endif
