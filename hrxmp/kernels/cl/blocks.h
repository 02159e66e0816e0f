// Weight matrices [n, k] as the kernels read them: one decoder for every GGUF block format.
//
// A format is a TYPE_ (q4_1, f16, ...), a LAYOUT_ (how it lies in memory) and k, the elements of a
// row; all three are constants where they are used, so that a kernel may read several formats.
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

// Facts about a format; `type` is a constant wherever these are used.
#define QUANTIZED(type) ((type) >= TYPE_q4_0)
#define SUPER(type) ((type) >= TYPE_q4_k)
#define MIN(type)                                                                                  \
    ((type) == TYPE_q4_1 || (type) == TYPE_q5_1 || (type) == TYPE_q4_k || (type) == TYPE_q5_k)
#define LOW(type) ((type) == TYPE_q8_0 ? 8 : 4)
#define HIGH(type)                                                                                 \
    ((type) == TYPE_q5_0 || (type) == TYPE_q5_1 || (type) == TYPE_q5_k ? 1                         \
     : (type) == TYPE_q6_k                                             ? 2                         \
                                                                       : 0)
#define ZERO(type) (MIN(type) ? 0 : (type) == TYPE_q8_0 ? 128 : 8 << HIGH(type))
// Elements that share one scale.
#define SUB(type) ((type) == TYPE_q6_k ? 16 : 32)

// Bytes of 16 rows: quants and scales of a block, scales of a super-block; a row group of k.
#define QUANT_BYTES(type) (64 * LOW(type) + 64 * HIGH(type))
#define SCALE_BYTES(type)                                                                          \
    (SUPER(type) ? 16 * (32 / SUB(type)) + 16 * MIN(type) : 32 + 32 * MIN(type))
#define SUPER_BYTES(type) (SUPER(type) ? 32 + 32 * MIN(type) : 0)
#define SCALES_AT(type, k) ((k) / 32 * QUANT_BYTES(type))
#define SUPERS_AT(type, k) (SCALES_AT(type, k) + (k) / 32 * SCALE_BYTES(type))
#define GROUP_BYTES(type, k)                                                                       \
    ((type) == TYPE_f32   ? (k) * 64                                                               \
     : (type) == TYPE_f16 ? (k) * 32                                                               \
                          : (SUPERS_AT(type, k) + (k) / 256 * SUPER_BYTES(type) + 63) / 64 * 64)

// Row group `group` of weight matrix `w`.
inline global const uchar *row_group(const int type, const int k, global const uchar *w,
                                     int group) {
    return w + (size_t)group * GROUP_BYTES(type, k);
}

// The scales of a block's 16 rows; of its super-block's.
inline global const uchar *block_scales(const int type, const int k, global const uchar *group,
                                        int block) {
    return group + SCALES_AT(type, k) + block * SCALE_BYTES(type);
}
inline global const half *super_scales(const int type, const int k, global const uchar *group,
                                       int block) {
    return (global const half *)(group + SUPERS_AT(type, k) + block / 8 * SUPER_BYTES(type));
}

// The lane's scale in block `block`, of elements block * 32 + part * SUB onwards.
inline float lane_scale(const int type, const int k, global const uchar *group, int lane, int block,
                        int part) {
    global const uchar *scales = block_scales(type, k, group, block);
    if (!SUPER(type))
        return vload_half(lane, (global const half *)scales);
    uchar factor = scales[part * 16 + lane];
    return vload_half(lane, super_scales(type, k, group, block)) *
           (type == TYPE_q6_k ? (float)as_char(factor) : (float)factor);
}

// What a lane's quants of one block have added: minimum, or -ZERO * scale.
inline float lane_offset(const int type, const int k, global const uchar *group, int lane,
                         int block, float scale) {
    global const uchar *scales = block_scales(type, k, group, block);
    if (!MIN(type))
        return -ZERO(type) * scale;
    if (!SUPER(type))
        return vload_half(lane + 16, (global const half *)scales);
    return -vload_half(lane + 16, super_scales(type, k, group, block)) * (float)scales[16 + lane];
}

// Four quants of a lane as bytes: k = block * 32 + chunk * 4 + j in byte j.
inline uint lane_quants(const int type, global const uchar *group, int lane, int block, int chunk) {
    global const uint *plane = (global const uint *)(group + block * QUANT_BYTES(type)) + lane;
    if (LOW(type) == 8)
        return plane[chunk * 16];
    uint quants = (plane[chunk % 4 * 16] >> (chunk / 4 * 4)) & 0x0f0f0f0fu;
    if (HIGH(type) == 1)
        quants |= ((plane[64] >> chunk) & 0x01010101u) << 4;
    if (HIGH(type) == 2)
        quants |= ((plane[64 + chunk / 4 * 16] >> (chunk % 4 * 2)) & 0x03030303u) << 4;
    return quants;
}

// One element of matrix w with rows of `k` elements, for kernels that read few of them.
inline float element(const int type, const int layout, const int k, global const uchar *w, int row,
                     int column) {
    if (layout == LAYOUT_ggml) {
        size_t at = (size_t)row * k + column;
        return type == TYPE_f32 ? ((global const float *)w)[at]
                                : vload_half(at, (global const half *)w);
    }
    global const uchar *group = row_group(type, k, w, row / 16);
    int lane = row % 16;
    if (type == TYPE_f32)
        return ((global const float *)group)[column * 16 + lane];
    if (type == TYPE_f16)
        return vload_half(column * 16 + lane, (global const half *)group);
    int block = column / 32;
    float scale = lane_scale(type, k, group, lane, block, column % 32 / SUB(type));
    uint quants = lane_quants(type, group, lane, block, column % 32 / 4);
    return scale * (float)((quants >> (column % 4 * 8)) & 255u) +
           lane_offset(type, k, group, lane, block, scale);
}

// For kernels with one matrix, whose format is WTYPE, LAYOUT and K.
#define weight_value(w, row, column)                                                               \
    element(PASTE(TYPE_, WTYPE), PASTE(LAYOUT_, LAYOUT), K, w, row, column)

#endif
