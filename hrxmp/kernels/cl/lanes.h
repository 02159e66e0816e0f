// 16 rows of a lane16 row group at once, as vectors: what `blocks.h` does for one lane.
// For CPU devices, whose compilers map 16-vectors to the processor's registers.

#ifndef LANES_H
#define LANES_H
#include "blocks.h"
#include "vector.h"

#if QUANTIZED
// Four quants of each of 16 rows; see lane_quants.
inline uint16 quants16(global const uchar *group, int block, int chunk) {
    global const uint *plane = (global const uint *)(group + block * QUANT_BYTES);
#if LOW == 8
    return vload16(chunk, plane);
#else
    uint16 quants = (vload16(chunk % 4, plane) >> (uint)(chunk / 4 * 4)) & 0x0f0f0f0fu;
#if HIGH == 1
    quants |= ((vload16(4, plane) >> (uint)chunk) & 0x01010101u) << 4u;
#elif HIGH == 2
    quants |= ((vload16(4 + chunk / 4, plane) >> (uint)(chunk % 4 * 2)) & 0x03030303u) << 4u;
#endif
    return quants;
#endif
}

inline float16 scales16(global const uchar *group, int block, int part) {
#if SUPER
    global const uchar *scales = group + SCALES_AT + block * SCALE_BYTES + part * 16;
    global const half *supers = (global const half *)(group + SUPERS_AT + block / 8 * SUPER_BYTES);
#if WEIGHT_TYPE == TYPE_q6_k
    return vload_half16(0, supers) * convert_float16(vload16(0, (global const char *)scales));
#else
    return vload_half16(0, supers) * convert_float16(vload16(0, scales));
#endif
#else
    return vload_half16(0, (global const half *)(group + SCALES_AT + block * SCALE_BYTES));
#endif
}

inline float16 minima16(global const uchar *group, int block) {
#if SUPER && MIN
    global const uchar *minima = group + SCALES_AT + block * SCALE_BYTES + 16;
    global const half *supers = (global const half *)(group + SUPERS_AT + block / 8 * SUPER_BYTES);
    return -vload_half16(1, supers) * convert_float16(vload16(0, minima));
#elif MIN
    return vload_half16(1, (global const half *)(group + SCALES_AT + block * SCALE_BYTES));
#else
    return (float16)0.0f;
#endif
}
#else
inline float16 values16(global const uchar *group, int k) {
#if WEIGHT_TYPE == TYPE_f16
    return vload_half16(k, (global const half *)group);
#else
    return vload16(k, (global const float *)group);
#endif
}
#endif

// 32 elements of each of 16 rows as floats: to[k * stride + lane].
inline void dequantize16(global const uchar *group, int block, local float *to, int stride) {
#if QUANTIZED
    float16 scale = scales16(group, block, 0), offset = MIN ? minima16(group, block) : -ZERO * scale;
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk++) {
#if SUB == 16
        if (chunk == 4) {
            scale = scales16(group, block, 1);
            offset = -ZERO * scale;
        }
#endif
        uint16 quants = quants16(group, block, chunk);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int16 value = as_int16((quants >> (uint)(8 * j)) & 255u);
            vstore16(mad(convert_float16(value), scale, offset), 0, to + (chunk * 4 + j) * stride);
        }
    }
#else
#pragma unroll
    for (int k = 0; k < 32; k++)
        vstore16(values16(group, block * 32 + k), 0, to + k * stride);
#endif
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
