// Dot products of packed weights with one activation row, 16 rows at once.
//
// The row is split into blocks of 32 as scale * x, x an integer of 16 bits: the rounding is 2^-16
// of a block's largest value, far below a float32 sum's own error over a row of weights of 4 to 8
// bits, and the products are then exact integers. DOT_vnni multiplies the bytes of x apart with
// the processor's byte dot product; DOT_pairs multiplies 16-bit pairs, which compilers find.

#ifndef DOT_H
#define DOT_H
#include "lanes.h"

#define DOT_pairs 1
#define DOT_vnni 2
#define DOT_floats 3
#define DOT_FORM PASTE(DOT_, DOT)
#define LARGEST 32512.0f

// A row of up to K_MAX elements, for weights of any format.
typedef struct {
    union {
        struct {
            uint first[K_MAX / 4];   // vnni: low bytes of four x; pairs: x0 and x2
            uint second[K_MAX / 4];  // vnni: high bytes of four x; pairs: x1 and x3
            float scale[K_MAX / 32];
            float sum[K_MAX / 32];  // of a block's rounded activations
            int isum[K_MAX / 32];   // the same in units of scale
            int halves[K_MAX / 16]; // and of each half of a block
        };
        float value[K_MAX];
    };
} Activations;

typedef short short32 __attribute__((ext_vector_type(32)));
typedef int int32 __attribute__((ext_vector_type(32)));

#if DOT_FORM == DOT_vnni
// The label makes the compiler see LLVM's own name of the instruction; OpenCL C has no builtin
// that becomes one. Chosen only where the processor has it.
typedef char char64 __attribute__((ext_vector_type(64)));
int16 byte_dot(int16 sum, char64 unsigned_bytes, char64 signed_bytes)
    __asm__("llvm.x86.avx512.vpdpbusd.512");
#endif

inline int16 pair_dot(uint16 a, uint16 b) {
    int32 product = __builtin_convertvector(__builtin_astype(a, short32), int32) *
                    __builtin_convertvector(__builtin_astype(b, short32), int32);
    return __builtin_shufflevector(product, product, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24,
                                   26, 28, 30) +
           __builtin_shufflevector(product, product, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25,
                                   27, 29, 31);
}

inline int put_activations(local Activations *to, int k, float16 value, float inverse) {
    int16 x = convert_int16(rint(value * inverse));
#if DOT_FORM == DOT_vnni
    uint4 first = as_uint4(convert_uchar16(x & 255));
    uint4 second = as_uint4(convert_uchar16(((x + 128) >> 8) & 255));
#else
    short16 pairs = convert_short16(x);
    uint4 first = as_uint4(pairs.even), second = as_uint4(pairs.odd);
#endif
    vstore4(first, k / 16, to->first);
    vstore4(second, k / 16, to->second);
    return isum16(x);
}

// Elements k..k+31; what is kept for one quantised `type` serves all of them.
inline void put_block(const int type, local Activations *to, int k, float16 a, float16 b) {
    if (!QUANTIZED(type)) {
        vstore16(a, 0, to->value + k);
        vstore16(b, 0, to->value + k + 16);
        return;
    }
    float top = max16(fmax(fabs(a), fabs(b)));
    float inverse = top > 0.0f ? LARGEST / top : 0.0f, scale = top / LARGEST;
    to->scale[k / 32] = scale;
    int first = put_activations(to, k, a, inverse), second = put_activations(to, k + 16, b, inverse);
    to->halves[k / 16] = first;
    to->halves[k / 16 + 1] = second;
    to->isum[k / 32] = first + second;
    to->sum[k / 32] = scale * (float)(first + second);
}

// Reads a row of k elements into `to`; `normed` first: x / rms(x) * norm_w.
inline void read_activations(const int type, const int k, const bool normed, local Activations *to,
                             global const float *x, global const float *norm_w, float eps) {
    float factor = 1.0f;
    if (normed) {
        float16 squares = 0.0f;
        for (int i = 0; i < k; i += 16) {
            float16 value = vload16(0, x + i);
            squares = mad(value, value, squares);
        }
        factor = rsqrt(sum16(squares) / k + eps);
    }
    for (int i = 0; i < k; i += 32) {
        float16 a = vload16(0, x + i), b = vload16(0, x + i + 16);
        if (normed) {
            a = a * factor * vload16(0, norm_w + i);
            b = b * factor * vload16(0, norm_w + i + 16);
        }
        put_block(type, to, i, a, b);
    }
}

// Products of one block's SUB elements from part * SUB on, in units of both scales.
inline int16 block_dot(const int type, global const uchar *group, local const Activations *x,
                       int block, const int part) {
    int16 low = -ZERO(type) * (SUB(type) == 16 ? x->halves[block * 2 + part] : x->isum[block]);
#if DOT_FORM == DOT_vnni
    int16 high = 0;
#endif
#pragma unroll
    for (int i = 0; i < SUB(type) / 4; i++) {
        int chunk = part * (SUB(type) / 4) + i;
        uint16 quants = quants16(type, group, block, chunk);
        uint16 first = x->first[block * 8 + chunk], second = x->second[block * 8 + chunk];
#if DOT_FORM == DOT_vnni
        char64 bytes = __builtin_astype(quants, char64);
        low = byte_dot(low, bytes, __builtin_astype(first, char64));
        high = byte_dot(high, bytes, __builtin_astype(second, char64));
#else
        low += pair_dot(quants & 0x00ff00ffu, first);
        low += pair_dot((quants >> 8u) & 0x00ff00ffu, second);
#endif
    }
#if DOT_FORM == DOT_vnni
    low += high << 8;
#endif
    return low;
}

// The products of a row group's 16 rows with the activations. The group at `next`, which is read
// after it, is asked for meanwhile.
inline float16 dot16(const int type, const int k, global const uchar *group,
                     global const uchar *next, local const Activations *x) {
    const int stride = GROUP_BYTES(type, k) / (k / 32);
    float16 sum = 0.0f;
    if (!QUANTIZED(type)) {
        float16 other = 0.0f;
        for (int i = 0; i < k; i += 2) {
            sum = mad(values16(type, group, i), (float16)x->value[i], sum);
            other = mad(values16(type, group, i + 1), (float16)x->value[i + 1], other);
        }
        return sum + other;
    }
    for (int block = 0; block < k / 32; block++) {
        fetch_ahead(next + block * stride, stride);
        float16 scale = scales16(type, k, group, block, 0) * x->scale[block];
        sum = mad(convert_float16(block_dot(type, group, x, block, 0)), scale, sum);
        if (SUB(type) == 16) {
            scale = scales16(type, k, group, block, 1) * x->scale[block];
            sum = mad(convert_float16(block_dot(type, group, x, block, 1)), scale, sum);
        }
        if (MIN(type))
            sum = mad(minima16(type, k, group, block), (float16)x->sum[block], sum);
    }
    return sum;
}
#endif
