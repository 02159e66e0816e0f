// 16 rows of a lane16 row group at once, as vectors: what `blocks.h` does for one lane.
// For CPU devices, whose compilers map 16-vectors to the processor's registers.

#ifndef LANES_H
#define LANES_H
#include "blocks.h"
#include "vector.h"

// Four quants of each of 16 rows; see lane_quants.
inline uint16 quants16(const int type, global const uchar *group, int block, int chunk) {
    global const uint *plane = (global const uint *)(group + block * QUANT_BYTES(type));
    if (LOW(type) == 8)
        return vload16(chunk, plane);
    uint16 quants = (vload16(chunk % 4, plane) >> (uint)(chunk / 4 * 4)) & 0x0f0f0f0fu;
    if (HIGH(type) == 1)
        quants |= ((vload16(4, plane) >> (uint)chunk) & 0x01010101u) << 4u;
    if (HIGH(type) == 2)
        quants |= ((vload16(4 + chunk / 4, plane) >> (uint)(chunk % 4 * 2)) & 0x03030303u) << 4u;
    return quants;
}

inline float16 scales16(const int type, const int k, global const uchar *group, int block,
                        int part) {
    global const uchar *scales = block_scales(type, k, group, block);
    if (!SUPER(type))
        return vload_half16(0, (global const half *)scales);
    uchar16 factors = vload16(part, scales);
    return vload_half16(0, super_scales(type, k, group, block)) *
           (type == TYPE_q6_k ? convert_float16(as_char16(factors)) : convert_float16(factors));
}

inline float16 minima16(const int type, const int k, global const uchar *group, int block) {
    global const uchar *scales = block_scales(type, k, group, block);
    if (!SUPER(type))
        return vload_half16(1, (global const half *)scales);
    return -vload_half16(1, super_scales(type, k, group, block)) *
           convert_float16(vload16(1, scales));
}

// Element `column` of 16 rows of f16 or f32.
inline float16 values16(const int type, global const uchar *group, int column) {
    return type == TYPE_f16 ? vload_half16(column, (global const half *)group)
                            : vload16(column, (global const float *)group);
}

// 32 elements of each of 16 rows as floats: to[element * stride + lane].
inline void dequantize16(const int type, const int k, global const uchar *group, int block,
                         local float *to, int stride) {
    if (!QUANTIZED(type)) {
        for (int i = 0; i < 32; i++)
            vstore16(values16(type, group, block * 32 + i), 0, to + i * stride);
        return;
    }
    float16 scale = scales16(type, k, group, block, 0);
    float16 offset = MIN(type) ? minima16(type, k, group, block) : -ZERO(type) * scale;
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk++) {
        if (SUB(type) == 16 && chunk == 4) {
            scale = scales16(type, k, group, block, 1);
            offset = -ZERO(type) * scale;
        }
        uint16 quants = quants16(type, group, block, chunk);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int16 value = as_int16((quants >> (uint)(8 * j)) & 255u);
            vstore16(mad(convert_float16(value), scale, offset), 0, to + (chunk * 4 + j) * stride);
        }
    }
}

// 16 results to y, of which the matrix may have fewer.
inline void store16(float16 value, global float *y, int count) {
    if (count >= 16) {
        vstore16(value, 0, y);
        return;
    }
    float lane[16];
    vstore16(value, 0, lane);
    for (int i = 0; i < count; i++)
        y[i] = lane[i];
}

inline float16 load16(global const float *x, int count) {
    if (count >= 16)
        return vload16(0, x);
    float lane[16];
    for (int i = 0; i < 16; i++)
        lane[i] = i < count ? x[i] : 0.0f;
    return vload16(0, lane);
}

inline float16 swiglu16(float16 gate, float16 up) {
    return gate / (1.0f + exp16(-gate)) * up;
}
#endif
