// Weight rows as NVIDIA's kernels read them: 32 weights, a chunk, at a time.
//
// Q4_K and Q5_K lie as in the file: their blocks keep 16-byte alignment. Layout planes holds, row by
// row, each field of all blocks together, padded to 16 bytes: quants, high bits, scales. A chunk is
// 16 bytes of low nibbles (32 bytes of Q8_0) with what belongs to them; its weights are two runs of
// 16 neighbouring elements, and a weight is scale * q + add.

#ifndef NV_BLOCKS_H
#define NV_BLOCKS_H
#include "nv_form.h"

#define FORMAT_none 0
#define FORMAT_f32 1
#define FORMAT_f16 2
#define FORMAT_q4_0 3
#define FORMAT_q4_1 4
#define FORMAT_q5_0 5
#define FORMAT_q5_1 6
#define FORMAT_q8_0 7
#define FORMAT_q4_k 8
#define FORMAT_q5_k 9
#define FORMAT_q6_k 10
#define FORMAT(name) JOIN(FORMAT_, name)

typedef struct {
    uint4 low, high;  // signed bytes: elements low_run(..) onwards, high_run(..) onwards
    float scale_low, scale_high, add_low, add_high;
} Chunk;

#define PAD16(bytes) (((bytes) + 15) / 16 * 16)

// Bytes of a row of k elements.
INLINE int row_bytes(int format, int k) {
    int n = k / 32, super = k / 256;
    switch (format) {
    case FORMAT_f32: return k * 4;
    case FORMAT_f16: return k * 2;
    case FORMAT_q4_0: return n * 16 + PAD16(n * 2);
    case FORMAT_q4_1: return n * 16 + PAD16(n * 4);
    case FORMAT_q5_0: return n * 16 + PAD16(n * 4) + PAD16(n * 2);
    case FORMAT_q5_1: return n * 16 + PAD16(n * 4) + PAD16(n * 4);
    case FORMAT_q8_0: return n * 32 + PAD16(n * 2);
    case FORMAT_q4_k: return super * 144;
    case FORMAT_q5_k: return super * 176;
    default: return super * 208 + PAD16(super * 2);
    }
}

// Where a chunk's two runs of 16 elements begin.
INLINE int low_run(int format, int chunk) {
    if (format == FORMAT_q6_k)
        return chunk / 4 * 128 + chunk % 4 * 16;
    if (format == FORMAT_q4_k || format == FORMAT_q5_k)
        return chunk / 2 * 64 + chunk % 2 * 16;
    return chunk * 32;
}

INLINE int high_run(int format, int chunk) {
    int apart = format == FORMAT_q6_k ? 64 : format == FORMAT_q4_k || format == FORMAT_q5_k ? 32 : 16;
    return low_run(format, chunk) + apart;
}

INLINE float half_at(global const uchar *p) { return vload_half(0, (global const half *)p); }

// Bit i of `bits` becomes bit 4 of byte i.
INLINE uint spread_bits(uint bits) { return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4; }

INLINE uint4 spread_bits16(uint bits) {
    return (uint4)(spread_bits(bits), spread_bits(bits >> 4), spread_bits(bits >> 8),
                   spread_bits(bits >> 12));
}

INLINE Chunk nibbles(uint4 quants) {
    Chunk c;
    c.low = quants & 0x0f0f0f0fu;
    c.high = quants >> 4 & 0x0f0f0f0fu;
    return c;
}

INLINE Chunk chunk_q8_0(global const uchar *row, int chunk, int k) {
    Chunk c;
    c.low = load_stream(row + chunk * 32);
    c.high = load_stream(row + chunk * 32 + 16);
    c.scale_low = c.scale_high = half_at(row + k + chunk * 2);
    c.add_low = c.add_high = 0.0f;
    return c;
}

// Q4_0, Q4_1, Q5_0, Q5_1.
INLINE Chunk chunk_plain(int format, global const uchar *row, int chunk, int k) {
    int n = k / 32;
    bool five = format == FORMAT_q5_0 || format == FORMAT_q5_1;
    Chunk c = nibbles(load_stream(row + chunk * 16));
    global const uchar *scales = row + n * 16;
    if (five) {
        uint bits = ((global const uint *)scales)[chunk];
        c.low |= spread_bits16(bits);
        c.high |= spread_bits16(bits >> 16);
        scales += PAD16(n * 4);
    }
    if (format == FORMAT_q4_1 || format == FORMAT_q5_1) {
        float2 both = halves_of(((global const uint *)scales)[chunk]);
        c.scale_low = both.x;
        c.add_low = both.y;
    } else {
        c.scale_low = half_at(scales + chunk * 2);
        c.add_low = (five ? -16.0f : -8.0f) * c.scale_low;
    }
    c.scale_high = c.scale_low;
    c.add_high = c.add_low;
    return c;
}

// Scales and minima of Q4_K and Q5_K: 6 bits each, of the sub-blocks 2 * pair and 2 * pair + 1.
INLINE void k_scales(Chunk *c, uint4 head, int pair) {
    int shift = pair % 2 * 16;
    uint scales, minima;
    if (pair < 2) {
        scales = head.y >> shift & 0x3f3fu;
        minima = head.z >> shift & 0x3f3fu;
    } else {
        scales = (head.w >> shift & 0x0f0fu) | (head.y >> shift >> 2 & 0x3030u);
        minima = (head.w >> shift >> 4 & 0x0f0fu) | (head.z >> shift >> 2 & 0x3030u);
    }
    float2 super = halves_of(head.x);
    c->scale_low = super.x * (float)(scales & 255u);
    c->scale_high = super.x * (float)(scales >> 8);
    c->add_low = -super.y * (float)(minima & 255u);
    c->add_high = -super.y * (float)(minima >> 8);
}

INLINE Chunk chunk_q4_k(global const uchar *row, int chunk) {
    global const uchar *block = row + chunk / 8 * 144;
    Chunk c = nibbles(load_stream(block + 16 + chunk % 8 * 16));
    k_scales(&c, load_shared(block), chunk % 8 / 2);
    return c;
}

INLINE Chunk chunk_q5_k(global const uchar *row, int chunk) {
    global const uchar *block = row + chunk / 8 * 176;
    int pair = chunk % 8 / 2;
    Chunk c = nibbles(load_stream(block + 48 + chunk % 8 * 16));
    uint4 bits = load_shared(block + 16 + chunk % 2 * 16) >> (uint)(pair * 2);
    c.low |= (bits & 0x01010101u) << 4;
    c.high |= (bits >> 1 & 0x01010101u) << 4;
    k_scales(&c, load_shared(block), pair);
    return c;
}

INLINE Chunk chunk_q6_k(global const uchar *row, int chunk, int k) {
    global const uchar *bits_at = row + k / 2, *scales = bits_at + k / 4, *supers = scales + k / 16;
    int low = low_run(FORMAT_q6_k, chunk);
    Chunk c = nibbles(load_stream(row + chunk * 16));
    uint4 bits = load_shared(bits_at + chunk / 4 * 32 + chunk % 2 * 16) >> (uint)(chunk % 4 / 2 * 2);
    c.low |= (bits & 0x03030303u) << 4;
    c.high |= (bits >> 4 & 0x03030303u) << 4;
    float super = half_at(supers + chunk / 8 * 2);
    c.scale_low = super * (float)(char)scales[low / 16];
    c.scale_high = super * (float)(char)scales[low / 16 + 4];
    c.add_low = -32.0f * c.scale_low;
    c.add_high = -32.0f * c.scale_high;
    return c;
}

// Chunk `chunk` of a row of k elements; `format` is known to the compiler.
INLINE Chunk chunk_of(int format, global const uchar *row, int chunk, int k) {
    switch (format) {
    case FORMAT_q8_0: return chunk_q8_0(row, chunk, k);
    case FORMAT_q4_k: return chunk_q4_k(row, chunk);
    case FORMAT_q5_k: return chunk_q5_k(row, chunk);
    case FORMAT_q6_k: return chunk_q6_k(row, chunk, k);
    default: return chunk_plain(format, row, chunk, k);
    }
}

// Two chunks of Q4_K, Q5_K or Q6_K as they are read: 64 weights, 32 low and 32 high nibbles.
typedef struct {
    uint4 quants0, quants1, bits0, bits1, head;
    uint scales;
    float super;
} Unit;

INLINE bool has_units(int format) { return format >= FORMAT_q4_k; }

INLINE int low_block(int format, int unit) { return low_run(format, 2 * unit); }
INLINE int high_block(int format, int unit) { return high_run(format, 2 * unit); }

INLINE Unit unit_of(int format, global const uchar *row, int unit, int k) {
    Unit u;
    global const uchar *quants = row + unit * 32;
    if (format == FORMAT_q6_k) {
        global const uchar *bits = row + k / 2 + unit / 2 * 32;
        global const uchar *scales = row + k / 2 + k / 4 + low_block(format, unit) / 16;
        u.bits0 = load_shared(bits);
        u.bits1 = load_shared(bits + 16);
        u.scales = *(global const ushort *)scales | *(global const ushort *)(scales + 4) << 16;
        u.super = half_at(row + k / 2 + k / 4 + k / 16 + unit / 4 * 2);
    } else {
        int bits = format == FORMAT_q5_k ? 32 : 0;
        global const uchar *block = row + unit / 4 * (144 + bits);
        u.head = load_shared(block);
        if (format == FORMAT_q5_k) {
            u.bits0 = load_shared(block + 16);
            u.bits1 = load_shared(block + 32);
        }
        quants = block + 16 + bits + unit % 4 * 32;
    }
    u.quants0 = load_stream(quants);
    u.quants1 = load_stream(quants + 16);
    return u;
}

// Bits of the high planes, in place above the nibbles, for the low or the high block.
INLINE uint4 bits_of(int format, uint4 bits, int unit, int high) {
    if (format == FORMAT_q6_k)
        return (bits >> (uint)(unit % 2 * 2 + high * 4) & 0x03030303u) << 4;
    return (bits >> (uint)(unit % 4 * 2 + high) & 0x01010101u) << 4;
}

INLINE void store_run(uint4 quants, float scale, float add, global float *y) {
    uint words[4] = {quants.x, quants.y, quants.z, quants.w};
    for (int i = 0; i < 4; i++)
        vstore4(convert_float4(as_char4(words[i])) * scale + add, i, y);
}

// Chunk `chunk` of row `id` of a table; an id outside it gives NaNs instead of a fault.
INLINE void get_chunk(int format, int k, int chunk, int id, int table_rows,
                      global const uchar *table, global float *y) {
    bool inside = id >= 0 && id < table_rows;
    size_t at = inside ? (size_t)id * row_bytes(format, k) : 0;
    Chunk c = chunk_of(format, table + at, chunk, k);
    float good = inside ? 0.0f : NAN;
    store_run(c.low, c.scale_low, c.add_low + good, y + low_run(format, chunk));
    store_run(c.high, c.scale_high, c.add_high + good, y + high_run(format, chunk));
}
#endif
