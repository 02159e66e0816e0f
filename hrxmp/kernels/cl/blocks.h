// Weight matrices [N, K] as the kernels read them: one decoder for every GGUF block format.
//
// WTYPE names the format (q4_1, f16, ...), LAYOUT how it lies in memory, K the elements of a row.
//
// Layout lane16 keeps 16 rows together, so that one SIMD lane owns one row. A row group of
// GROUP_BYTES holds, for each 32 elements of k, the quants of its 16 rows as dwords (dword r of 16
// is row r's), then all scales, then the scales of super-blocks:
//   low plane, 4 bits: dword c (0..3), byte j: k = 4c + j in the low nibble, 16 + 4c + j in the high
//   low plane, 8 bits: dword c (0..7), byte j: k = 4c + j
//   high plane of 1 bit:  one dword, byte j, bit c:  bit 4 of k = 4c + j
//   high plane of 2 bits: dwords p = 0, 1, byte j, bits 2c, 2c + 1:  bits 4, 5 of k = 16p + 4c + j
// Every value is scale * (q - ZERO), or scale * q + minimum where MIN. Layout ggml is row-major
// f32 or f16, for matrices that a graph computes.

#ifndef BLOCKS_H
#define BLOCKS_H

#define TYPE_f32 1
#define TYPE_f16 2
#define TYPE_q4_0 3
#define TYPE_q4_1 4
#define TYPE_q5_0 5
#define TYPE_q5_1 6
#define TYPE_q8_0 7
#define TYPE_q4_k 8
#define TYPE_q5_k 9
#define TYPE_q6_k 10
#define LAYOUT_ggml 1
#define LAYOUT_lane16 2
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define WEIGHT_TYPE PASTE(TYPE_, WTYPE)
#define WEIGHT_LAYOUT PASTE(LAYOUT_, LAYOUT)

#define QUANTIZED (WEIGHT_TYPE >= TYPE_q4_0)
#define SUPER (WEIGHT_TYPE >= TYPE_q4_k)
#define MIN                                                                                        \
    (WEIGHT_TYPE == TYPE_q4_1 || WEIGHT_TYPE == TYPE_q5_1 || WEIGHT_TYPE == TYPE_q4_k ||           \
     WEIGHT_TYPE == TYPE_q5_k)
#if WEIGHT_TYPE == TYPE_q8_0
#define LOW 8
#else
#define LOW 4
#endif
#if WEIGHT_TYPE == TYPE_q5_0 || WEIGHT_TYPE == TYPE_q5_1 || WEIGHT_TYPE == TYPE_q5_k
#define HIGH 1
#elif WEIGHT_TYPE == TYPE_q6_k
#define HIGH 2
#else
#define HIGH 0
#endif
#if MIN
#define ZERO 0
#elif WEIGHT_TYPE == TYPE_q8_0
#define ZERO 128
#else
#define ZERO (8 << HIGH)
#endif
// Elements that share one scale.
#if WEIGHT_TYPE == TYPE_q6_k
#define SUB 16
#else
#define SUB 32
#endif

#if QUANTIZED
#define QUANT_BYTES (64 * LOW + 64 * HIGH)
#if SUPER
#define SCALE_BYTES (16 * (32 / SUB) + 16 * MIN)
#define SUPER_BYTES (32 + 32 * MIN)
#else
#define SCALE_BYTES (32 + 32 * MIN)
#define SUPER_BYTES 0
#endif
#define SCALES_AT (K / 32 * QUANT_BYTES)
#define SUPERS_AT (SCALES_AT + K / 32 * SCALE_BYTES)
#define GROUP_BYTES ((SUPERS_AT + K / 256 * SUPER_BYTES + 63) / 64 * 64)
#elif WEIGHT_TYPE == TYPE_f16
#define GROUP_BYTES (K * 32)
#else
#define GROUP_BYTES (K * 64)
#endif

// Row group `group` of weight matrix `w`.
inline global const uchar *row_group(global const uchar *w, int group) {
    return w + (size_t)group * GROUP_BYTES;
}

#if QUANTIZED
// The lane's scale in block `block`, of elements block * 32 + part * SUB onwards.
inline float lane_scale(global const uchar *group, int lane, int block, int part) {
#if SUPER
    global const uchar *scales = group + SCALES_AT + block * SCALE_BYTES + part * 16;
    global const half *supers = (global const half *)(group + SUPERS_AT + block / 8 * SUPER_BYTES);
#if WEIGHT_TYPE == TYPE_q6_k
    return vload_half(lane, supers) * (float)(char)scales[lane];
#else
    return vload_half(lane, supers) * (float)scales[lane];
#endif
#else
    return vload_half(lane, (global const half *)(group + SCALES_AT + block * SCALE_BYTES));
#endif
}

// What a lane's quants of one block have added: minimum, or -ZERO * scale.
inline float lane_offset(global const uchar *group, int lane, int block, float scale) {
#if SUPER && MIN
    global const uchar *minima = group + SCALES_AT + block * SCALE_BYTES + 16;
    global const half *supers = (global const half *)(group + SUPERS_AT + block / 8 * SUPER_BYTES);
    return -vload_half(lane + 16, supers) * (float)minima[lane];
#elif MIN
    return vload_half(lane + 16, (global const half *)(group + SCALES_AT + block * SCALE_BYTES));
#else
    return -ZERO * scale;
#endif
}

// Four quants of a lane as bytes: k = block * 32 + chunk * 4 + j in byte j.
inline uint lane_quants(global const uchar *group, int lane, int block, int chunk) {
    global const uint *plane = (global const uint *)(group + block * QUANT_BYTES) + lane;
#if LOW == 8
    return plane[chunk * 16];
#else
    uint quants = (plane[chunk % 4 * 16] >> (chunk / 4 * 4)) & 0x0f0f0f0fu;
#if HIGH == 1
    quants |= ((plane[64] >> chunk) & 0x01010101u) << 4;
#elif HIGH == 2
    quants |= ((plane[64 + chunk / 4 * 16] >> (chunk % 4 * 2)) & 0x03030303u) << 4;
#endif
    return quants;
#endif
}

#endif

// One element, for kernels that read few of them.
inline float weight_value(global const uchar *w, int row, int k) {
#if WEIGHT_LAYOUT == LAYOUT_ggml && WEIGHT_TYPE == TYPE_f32
    return ((global const float *)w)[(size_t)row * K + k];
#elif WEIGHT_LAYOUT == LAYOUT_ggml
    return vload_half((size_t)row * K + k, (global const half *)w);
#else
    global const uchar *group = row_group(w, row / 16);
    int lane = row % 16;
#if WEIGHT_TYPE == TYPE_f32
    return ((global const float *)group)[k * 16 + lane];
#elif WEIGHT_TYPE == TYPE_f16
    return vload_half(k * 16 + lane, (global const half *)group);
#else
    int block = k / 32, part = k % 32 / SUB;
    float scale = lane_scale(group, lane, block, part);
    uint quants = lane_quants(group, lane, block, k % 32 / 4);
    return scale * (float)((quants >> (k % 4 * 8)) & 255u) + lane_offset(group, lane, block, scale);
#endif
#endif
}

#endif
