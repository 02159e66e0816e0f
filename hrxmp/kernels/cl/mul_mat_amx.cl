// y = x w for many rows x, weights in layout lane16, on x86 processors with tile registers for bytes
// (AMX), through Intel's CPU runtime: OpenCL C has no words for tiles, so they are inline assembly.
//
// A work-group owns TOKENS rows of x and a share of the row groups. It splits its rows into 16-bit
// integers and their bytes (see dot.h), once; takes each row group apart into signed bytes, once;
// and multiplies tiles of 16 rows x 16 weight rows x SUB elements. Each tile's exact integer sums
// are scaled and added to float32 sums in vector registers. Sums over DEPTH elements of k wait in y.

#include "lanes.h"
#include "mul_mat.h"

#define LARGEST 32512.0f
#define BLOCKS (DEPTH / 32)
#define TILES (TOKENS / 16)
#define AHEAD 1  // steps between tiles and the vectors that read their sums

// Rows of x as the tiles read them: [tile][block][high, low byte][row of 16][32 bytes].
typedef struct {
    char bytes[TILES][BLOCKS][2][16][32];
    float scale[TILES][BLOCKS][16];
    float sum[TILES][BLOCKS][16];
} Rows;

// 16 rows of a weight: [block][chunk][row of 16][4 bytes], with scales and what they add.
typedef struct {
    uint quants[BLOCKS][8][16];
    float16 scale[BLOCKS][2];
    float16 minimum[BLOCKS];
} Columns;

typedef struct {
    uchar palette, start, reserved[14];
    ushort row_bytes[16];
    uchar rows[16];
} Shape;

typedef struct {
    int high[16][16], low[16][16];
} Sums;

// Tiles 0 and 1 are sums of 16 x 16, 2 and 3 rows of x, 4 weights; `width` elements of k each.
inline void shape_tiles(const int width, local Shape *shape) {
    local uchar *bytes = (local uchar *)shape;
    for (int i = 0; i < 64; i++)
        bytes[i] = 0;
    shape->palette = 1;
    for (int i = 0; i < 5; i++) {
        shape->row_bytes[i] = i == 2 || i == 3 ? width : 64;
        shape->rows[i] = i == 4 ? width / 4 : 16;
    }
    __asm__ volatile("ldtilecfg (%0)" : : "r"(shape) : "memory");
}

inline void multiply_tiles(local const char *high, local const char *low, local const uint *quants,
                           local Sums *to) {
    __asm__ volatile("tilezero %%tmm0\n\t"
                     "tilezero %%tmm1\n\t"
                     "tileloadd (%2,%3,1), %%tmm4\n\t"
                     "tileloadd (%0,%4,1), %%tmm2\n\t"
                     "tileloadd (%1,%4,1), %%tmm3\n\t"
                     "tdpbssd %%tmm4, %%tmm2, %%tmm0\n\t"
                     "tdpbssd %%tmm4, %%tmm3, %%tmm1\n\t"
                     "tilestored %%tmm0, (%5,%3,1)\n\t"
                     "tilestored %%tmm1, (%6,%3,1)"
                     :
                     : "r"(high), "r"(low), "r"(quants), "r"(64L), "r"(32L), "r"(to->high),
                       "r"(to->low)
                     : "memory");
}

// One row's elements start..start + depth as bytes, scales and sums.
inline void put_row(local Rows *to, int token, global const float *x, int depth) {
    int tile = token / 16, t = token % 16;
    for (int block = 0; block < depth / 32; block++) {
        float16 a = vload16(block * 2, x), b = vload16(block * 2 + 1, x);
        float top = max16(fmax(fabs(a), fabs(b))), scale = top / LARGEST;
        float inverse = top > 0.0f ? LARGEST / top : 0.0f;
        int16 first = convert_int16(rint(a * inverse)), second = convert_int16(rint(b * inverse));
        local char *high = to->bytes[tile][block][0][t], *low = to->bytes[tile][block][1][t];
        vstore16(as_char16(convert_uchar16(((first + 128) >> 8) & 255)), 0, high);
        vstore16(as_char16(convert_uchar16(((second + 128) >> 8) & 255)), 1, high);
        vstore16(as_char16(convert_uchar16(first & 255)), 0, low);
        vstore16(as_char16(convert_uchar16(second & 255)), 1, low);
        to->scale[tile][block][t] = scale;
        to->sum[tile][block][t] = scale * (float)isum16(first + second);
    }
}

// Rows that a last tile has too many count nothing: what lies there may be slow to compute with.
inline void hide_rows(local Rows *to, int tokens, int depth) {
    for (int t = tokens % 16; t % 16; t++)
        for (int block = 0; block < depth / 32; block++) {
            to->scale[tokens / 16][block][t] = 0.0f;
            to->sum[tokens / 16][block][t] = 0.0f;
        }
}

// Blocks first.. of a row group as signed bytes: q - ZERO, which is in range for every format.
inline void put_columns(const int type, local Columns *to, global const uchar *group, int first,
                        int depth) {
    for (int block = 0; block < depth / 32; block++) {
#pragma unroll
        for (int chunk = 0; chunk < 8; chunk++) {
            uint16 quants = quants16(type, group, first + block, chunk);
            if (LOW(type) == 8)
                quants ^= 0x80808080u;
            else if (ZERO(type))
                // No borrow between bytes: each has bit 7 set while it is subtracted from.
                quants = ((quants | 0x80808080u) - ZERO(type) * 0x01010101u) ^ 0x80808080u;
            vstore16(quants, 0, to->quants[block][chunk]);
        }
        to->scale[block][0] = scales16(type, K, group, first + block, 0);
        if (SUB(type) == 16)
            to->scale[block][1] = scales16(type, K, group, first + block, 1);
        if (MIN(type))
            to->minimum[block] = minima16(type, K, group, first + block);
    }
}

// sum[t] += the products of a tile of rows with 16 weight rows.
inline void add_products(const int type, local const Rows *rows, int tile, local const Columns *w,
                         int depth, local Sums *scratch, float16 *sum) {
    const int parts = 32 / SUB(type), steps = depth / SUB(type);
    for (int step = -AHEAD; step < steps; step++) {
        int next = step + AHEAD, block = step / parts;
        // Later tiles are multiplied while these sums are scaled.
        if (next < steps)
            multiply_tiles(rows->bytes[tile][next / parts][0][0] + next % parts * SUB(type),
                           rows->bytes[tile][next / parts][1][0] + next % parts * SUB(type),
                           w->quants[next / parts][next % parts * (SUB(type) / 4)],
                           scratch + next % (AHEAD + 1));
        if (step < 0)
            continue;
        local const Sums *done = scratch + step % (AHEAD + 1);
        float16 scale = w->scale[block][step % parts];
#pragma unroll
        for (int t = 0; t < 16; t++) {
            int16 total = (vload16(0, done->high[t]) << 8) + vload16(0, done->low[t]);
            sum[t] = mad(convert_float16(total), scale * rows->scale[tile][block][t], sum[t]);
            if (MIN(type))
                sum[t] = mad(w->minimum[block], (float16)rows->sum[tile][block][t], sum[t]);
        }
    }
}

// Products of one tile with one row group, shaped for its format.
inline void products(const int type, local const Rows *rows, int tile, local const Columns *w,
                     int depth, local Sums *scratch, local float16 *to) {
    float16 sum[16];
#pragma unroll
    for (int t = 0; t < 16; t++)
        sum[t] = 0.0f;
    add_products(type, rows, tile, w, depth, scratch, sum);
#pragma unroll
    for (int t = 0; t < 16; t++)
        to[t] = sum[t];
}

inline void take_columns(const int type, local Columns *to, local Shape *shape,
                         global const uchar *group, int first, int depth) {
    put_columns(type, to, group, first, depth);
    shape_tiles(SUB(type), shape);
}

OF_VECTORS
kernel void mul_mat_amx(int m, int x_stride, int x_offset, int r_stride, int r_offset, int y_stride,
                        int y_offset, global const float *x, global const uchar *w0,
                        global const uchar *w1, global const uchar *w2,
                        global const float *residual, global float *y) {
    local Rows rows;
    local Columns columns;
    local Sums scratch[AHEAD + 1];
    local Shape shape;
    local float16 result[16], gate[SWIGLU ? TOKENS : 1];
    // Tiles of rows are shared out evenly; no share is larger than TOKENS.
    int all = (m + 15) / 16, chunk = get_group_id(1), chunks = get_num_groups(1);
    int first = all * chunk / chunks * 16, tokens = min(all * (chunk + 1) / chunks * 16, m) - first;
    if (tokens <= 0)
        return;
    int part = get_group_id(0), parts = get_num_groups(0);
    int begin = TOTAL_GROUPS * part / parts, end = TOTAL_GROUPS * (part + 1) / parts;
    x += x_offset + first * x_stride;
    for (int start = 0; start < K; start += DEPTH) {
        int depth = min(K - start, DEPTH);
        for (int t = 0; t < tokens; t++)
            put_row(&rows, t, x + t * x_stride + start, depth);
        hide_rows(&rows, tokens, depth);
        for (int group = begin; group < end; group++) {
            Target target = target_of(group, w0, w1, w2);
            WITH_TYPE_OF(target, take_columns, &columns, &shape, target.weights, start / 32, depth);
#if SWIGLU
            for (int tile = 0; tile * 16 < tokens; tile++)
                products(TYPE0, &rows, tile, &columns, depth, scratch, gate + tile * 16);
            take_columns(TYPE1, &columns, &shape, row_group(TYPE1, K, w1, group), start / 32,
                         depth);
#endif
            for (int tile = 0; tile * 16 < tokens; tile++) {
#if SWIGLU
                products(TYPE1, &rows, tile, &columns, depth, scratch, result);
#else
                WITH_TYPE_OF(target, products, &rows, tile, &columns, depth, scratch, result);
#endif
                for (int i = 0; i < 16 && tile * 16 + i < tokens; i++) {
                    int t = tile * 16 + i;
                    global float *to = y + y_offset + (first + t) * y_stride + target.row;
                    float16 value = result[i];
#if SWIGLU
                    value = swiglu16(gate[t], value);
#else
                    if (start)
                        value += load16(to, target.count);
#if ADD
                    else
                        value += load16(residual + r_offset + (first + t) * r_stride + target.row,
                                        target.count);
#endif
#endif
                    store16(value, to, target.count);
                }
            }
        }
    }
    __asm__ volatile("tilerelease" : : : "memory");
}
