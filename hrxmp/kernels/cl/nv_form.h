// What NVIDIA's devices do in one instruction, and the same in plain OpenCL C for every other one.
//
// FORM is ptx or plain. A warp is 32 neighbouring items. In the plain form a shuffle goes through
// `scratch` (LX floats of local memory) and two barriers: it must be reached by all items.

#ifndef NV_FORM_H
#define NV_FORM_H
#include "common.h"

// Sizes come as arguments that are constants at the call: only inlining makes them constants inside.
#define INLINE inline __attribute__((always_inline))

#define FORM_plain 0
#define FORM_ptx 1
#define PTX JOIN(FORM_, FORM)
#define WARP 32
#define WARPS (LX / WARP)

// c plus the products of four signed bytes.
INLINE int dot4(uint a, uint b, int c) {
#if PTX
    int sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#else
    int4 products = convert_int4(as_char4(a)) * convert_int4(as_char4(b));
    return c + products.x + products.y + products.z + products.w;
#endif
}

// The value of the item whose number differs in the bits of `mask`, which is below 32.
INLINE float lane_xor(float value, int mask, local float *scratch) {
#if PTX
    float other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
                 : "=f"(other)
                 : "f"(value), "r"(mask));
    return other;
#else
    int item = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[item] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    return scratch[item ^ mask];
#endif
}

INLINE float warp_sum(float value, local float *scratch) {
    for (int mask = WARP / 2; mask > 0; mask /= 2)
        value += lane_xor(value, mask, scratch);
    return value;
}

// The sum over a work-group, for every item. `scratch` may be used again at once.
INLINE float group_total(float value, local float *scratch) {
    value = warp_sum(value, scratch);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) % WARP == 0)
        scratch[get_local_id(0) / WARP] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    float total = 0.0f;
    for (int warp = 0; warp < WARPS; warp++)
        total += scratch[warp];
    barrier(CLK_LOCAL_MEM_FENCE);
    return total;
}

INLINE float group_top(float value, local float *scratch) {
    for (int mask = WARP / 2; mask > 0; mask /= 2)
        value = fmax(value, lane_xor(value, mask, scratch));
    barrier(CLK_LOCAL_MEM_FENCE);
    if (get_local_id(0) % WARP == 0)
        scratch[get_local_id(0) / WARP] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    float top = scratch[0];
    for (int warp = 1; warp < WARPS; warp++)
        top = fmax(top, scratch[warp]);
    barrier(CLK_LOCAL_MEM_FENCE);
    return top;
}

// 16 bytes that are read once; aligned.
INLINE uint4 load_stream(global const uchar *p) {
#if PTX
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"((ulong)p));
    return v;
#else
    return *(global const uint4 *)p;
#endif
}

// 16 bytes that neighbouring lanes read too; aligned.
INLINE uint4 load_shared(global const uchar *p) {
#if PTX
    uint4 v;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"((ulong)p));
    return v;
#else
    return *(global const uint4 *)p;
#endif
}

// Two halves in a dword.
INLINE float2 halves_of(uint pair) {
#if PTX
    float2 v;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(pair));
    return v;
#else
    return vload_half2(0, (half *)&pair);
#endif
}

// Two floats as the nearest halves in a dword.
INLINE uint pack_halves(float low, float high) {
    uint pair;
#if PTX
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    vstore_half2_rte((float2)(low, high), 0, (half *)&pair);
#endif
    return pair;
}

// 2 to the x, to some units in the last place.
INLINE float power_of_two(float x) {
#if PTX
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return exp2(x);
#endif
}

// c + a b of a warp: 16 x 16 halves by 16 x 8, the sums in float. With g = lane / 4 and t = lane % 4 a
// lane has, of a, elements 2 t and 2 t + 1 of the rows g and g + 8, then the same 8 elements later; of
// b elements 2 t and 2 t + 1, then 8 later, of column g; of c columns 2 t and 2 t + 1 of the rows g and
// g + 8. `scratch`, in the plain form, has six words an item, and all items must come.
INLINE float4 multiply_halves(uint4 a, uint2 b, float4 c, local uint *scratch) {
#if PTX
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    return c;
#else
    int item = get_local_id(0), warp = item / WARP * WARP, g = item % WARP / 4, t = item % 4;
    barrier(CLK_LOCAL_MEM_FENCE);
    vstore4(a, 0, scratch + item * 6);
    vstore2(b, 0, scratch + item * 6 + 4);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < 16; k += 2) {
        int word = k / 8, lane = k % 8 / 2;
        local const uint *left = scratch + (warp + g * 4 + lane) * 6 + word * 2;
        local const uint *right = scratch + (warp + t * 8 + lane) * 6 + 4 + word;
        float2 upper = halves_of(left[0]), lower = halves_of(left[1]);
        float2 first = halves_of(right[0]), second = halves_of(right[4 * 6]);
        c += (float4)(dot(upper, first), dot(upper, second), dot(lower, first), dot(lower, second));
    }
    return c;
#endif
}
#endif
