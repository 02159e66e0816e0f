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

typedef struct {
#if QUANTIZED
    uint first[K / 4];   // vnni: low bytes of four x; pairs: x0 and x2
    uint second[K / 4];  // vnni: high bytes of four x; pairs: x1 and x3
    float scale[K / 32];
    float sum[K / SUB];    // sum of a sub-block's rounded activations
    int isum[K / SUB];     // the same in units of scale
#else
    float value[K];
#endif
} Activations;

#if QUANTIZED
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

inline void put_activations(local Activations *to, int k, float16 value, float inverse, float scale) {
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
    int sum = isum16(x);
#if SUB == 16
    to->isum[k / 16] = sum;
    to->sum[k / 16] = scale * (float)sum;
#else
    to->isum[k / 32] = sum + (k % 32 ? to->isum[k / 32] : 0);
    to->sum[k / 32] = scale * (float)to->isum[k / 32];
#endif
}
#endif

// Reads one row into `to`, normalised first where NORM: x / rms(x) * norm_w.
inline void read_activations(local Activations *to, global const float *x,
                             global const float *norm_w, float eps) {
    float factor = 1.0f;
#if NORM
    float16 squares = 0.0f;
    for (int k = 0; k < K; k += 16) {
        float16 value = vload16(0, x + k);
        squares = mad(value, value, squares);
    }
    factor = rsqrt(sum16(squares) / K + eps);
#endif
    for (int k = 0; k < K; k += 32) {
        float16 a = vload16(0, x + k), b = vload16(0, x + k + 16);
#if NORM
        a = a * factor * vload16(0, norm_w + k);
        b = b * factor * vload16(0, norm_w + k + 16);
#endif
#if QUANTIZED
        float top = max16(fmax(fabs(a), fabs(b)));
        float inverse = top > 0.0f ? LARGEST / top : 0.0f, scale = top / LARGEST;
        to->scale[k / 32] = scale;
        put_activations(to, k, a, inverse, scale);
        put_activations(to, k + 16, b, inverse, scale);
#else
        vstore16(a, 0, to->value + k);
        vstore16(b, 0, to->value + k + 16);
#endif
    }
}

// The products of a row group's 16 rows with the activations.
inline float16 dot16(global const uchar *group, local const Activations *x) {
    float16 sum = 0.0f;
#if QUANTIZED
    for (int block = 0; block < K / 32; block++) {
#pragma unroll
        for (int part = 0; part < 32 / SUB; part++) {
            int16 low = -ZERO * x->isum[block * (32 / SUB) + part];
#if DOT_FORM == DOT_vnni
            int16 high = 0;
#endif
#pragma unroll
            for (int i = 0; i < SUB / 4; i++) {
                int chunk = part * (SUB / 4) + i;
                uint16 quants = quants16(group, block, chunk);
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
            float16 scale = scales16(group, block, part) * x->scale[block];
            sum = mad(convert_float16(low), scale, sum);
        }
        if (MIN)
            sum = mad(minima16(group, block), (float16)x->sum[block], sum);
    }
#else
    float16 other = 0.0f;
    for (int k = 0; k < K; k += 2) {
        sum = mad(values16(group, k), (float16)x->value[k], sum);
        other = mad(values16(group, k + 1), (float16)x->value[k + 1], other);
    }
    sum += other;
#endif
    return sum;
}
#endif
