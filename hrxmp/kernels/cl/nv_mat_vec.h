// y = x w for one row of x: a work-group brings the row into local memory once, its warps take a few
// rows of the weights each, some warps may share the elements of a row.
//
// Neighbouring tiles go to different groups, and the groups stride over them: few groups bring few
// copies of the row, and all of the device reads at any time. A Shape is a constant wherever it is
// used; one kernel may have several.

#ifndef NV_MAT_VEC_H
#define NV_MAT_VEC_H
#include "nv_blocks.h"
#include "nv_row.h"

#define EPILOGUE_none 0
#define EPILOGUE_add 1
#define EPILOGUE_swiglu 2
#define EPILOGUE_OF(name) JOIN(EPILOGUE_, name)

#define MAX_SUMS 4    // rows of a tile, those of gate and up both counted
#define MAX_PASSES 4  // of a group over a row: K up to 16 * LX

typedef struct {
    int w0, w1, w2;  // formats
    int k, n0, n1, n2;
    int epilogue, norm;
    int packed;       // all formats quantised; else all f16 or f32
    int rows, split;  // rows of a tile; warps that share a tile
} Shape;

typedef struct {
    global const float *x, *norm_w, *residual;
    global const uchar *w0, *w1, *w2;
    global float *y;
    float eps;
} Operands;

// Local memory of a group; `row` has ROW_WORDS.
typedef struct {
    local uint *row;
    local float *results, *scratch;  // WARPS * MAX_SUMS, LX
} Desk;

// A few rows of one weight.
typedef struct {
    global const uchar *w;
    int weight, row, n, column;  // which one, first row, rows that exist, first column of y
} Tile;

INLINE int tiles_of(Shape s, int n) { return (n + s.rows - 1) / s.rows; }
INLINE bool swiglu(Shape s) { return s.epilogue == EPILOGUE_swiglu; }
INLINE int sums_of(Shape s) { return swiglu(s) ? 2 * s.rows : s.rows; }

INLINE int tile_count(Shape s) {
    return swiglu(s) ? tiles_of(s, s.n0) : tiles_of(s, s.n0) + tiles_of(s, s.n1) + tiles_of(s, s.n2);
}

INLINE int format_of(Shape s, int weight) { return weight == 0 ? s.w0 : weight == 1 ? s.w1 : s.w2; }

INLINE Tile tile_at(Shape s, Operands o, int tile) {
    int second = tile - tiles_of(s, s.n0), third = second - tiles_of(s, s.n1);
    if (swiglu(s) || second < 0)
        return (Tile){o.w0, 0, tile * s.rows, s.n0, tile * s.rows};
    if (third < 0)
        return (Tile){o.w1, 1, second * s.rows, s.n1, s.n0 + second * s.rows};
    return (Tile){o.w2, 2, third * s.rows, s.n2, s.n0 + s.n1 + third * s.rows};
}

INLINE void load_row(Shape s, Operands o, Desk desk) {
    float4 values[MAX_PASSES];
    float squares = 0.0f, factor = 1.0f;
    int passes = (s.k + 4 * LX - 1) / (4 * LX);
#pragma unroll
    for (int pass = 0; pass < passes; pass++) {
        int element = (pass * LX + get_local_id(0)) * 4;
        values[pass] = element < s.k ? vload4(0, o.x + element) : (float4)0.0f;
        squares += dot(values[pass], values[pass]);
    }
    if (s.norm)
        factor = 1.0f / sqrt(group_total(squares, desk.scratch) / s.k + o.eps);
#pragma unroll
    for (int pass = 0; pass < passes; pass++) {
        int element = (pass * LX + get_local_id(0)) * 4;
        if (s.norm && element < s.k)
            values[pass] *= factor * vload4(0, o.norm_w + element);
        if (s.packed)
            put_packed(desk.row, values[pass], element, s.k, GAP, desk.scratch);
        else if (element < s.k)
            vstore4(values[pass], 0, (local float *)desk.row + element);
    }
}

INLINE int chunks_of(Shape s) { return s.packed ? s.k / 32 : s.w0 == FORMAT_f16 ? s.k / 8 : s.k / 4; }

INLINE float dot_halves(uint4 v, local const float *x) {
    return dot((float4)(halves_of(v.x), halves_of(v.y)), vload4(0, x)) +
           dot((float4)(halves_of(v.z), halves_of(v.w)), vload4(1, x));
}

INLINE void dot_chunk(Shape s, int format, global const uchar **w, int chunk,
                      local const uint *row, float *sums) {
    if (s.packed) {
        Run low = run_at(row, low_run(format, chunk), s.k);
        Run high = run_at(row, high_run(format, chunk), s.k);
#pragma unroll
        for (int i = 0; i < sums_of(s); i++) {
            Chunk c = chunk_of(format, w[i], chunk, s.k);
            sums[i] += run_dot(c.low, c.scale_low, c.add_low, low) +
                       run_dot(c.high, c.scale_high, c.add_high, high);
        }
        return;
    }
    local const float *x = (local const float *)row;
#pragma unroll
    for (int i = 0; i < sums_of(s); i++) {
        uint4 v = load_stream(w[i] + chunk * 16);
        sums[i] += format == FORMAT_f16 ? dot_halves(v, x + chunk * 8)
                                        : dot(as_float4(v), vload4(chunk, x));
    }
}

// One block of a unit: its nibbles are shifted down, its high bits put above them.
INLINE float dot_block(int format, Unit u, int unit, int high, float scale, float add, Block x) {
    uint4 first = u.quants0 >> (uint)(4 * high) & 0x0f0f0f0fu;
    uint4 second = u.quants1 >> (uint)(4 * high) & 0x0f0f0f0fu;
    if (format != FORMAT_q4_k) {
        first |= bits_of(format, u.bits0, unit, high);
        second |= bits_of(format, u.bits1, unit, high);
    }
    if (format == FORMAT_q6_k) {
        float scale0 = u.super * (float)(char)(u.scales >> (16 * high));
        float scale1 = u.super * (float)(char)(u.scales >> (16 * high + 8));
        int dot0 = dot16(first, x.high0, 0) * 256 + dot16(first, x.low0, 0);
        int dot1 = dot16(second, x.high1, 0) * 256 + dot16(second, x.low1, 0);
        return scale0 * (x.scale * (float)dot0 - 32.0f * x.sum0) +
               scale1 * (x.scale * (float)dot1 - 32.0f * x.sum1);
    }
    int highs = dot16(second, x.high1, dot16(first, x.high0, 0));
    int lows = dot16(second, x.low1, dot16(first, x.low0, 0));
    return scale * (x.scale * (float)(highs * 256 + lows)) + add * (x.sum0 + x.sum1);
}

INLINE void dot_unit(Shape s, int format, global const uchar **w, int unit,
                     local const uint *row, float *sums) {
    Unit units[MAX_SUMS];
#pragma unroll
    for (int i = 0; i < sums_of(s); i++)
        units[i] = unit_of(format, w[i], unit, s.k);
    Block low = block_at(row, low_block(format, unit), s.k);
    Block high = block_at(row, high_block(format, unit), s.k);
#pragma unroll
    for (int i = 0; i < sums_of(s); i++) {
        Chunk c;
        if (format != FORMAT_q6_k)
            k_scales(&c, units[i].head, unit % 4);
        sums[i] += dot_block(format, units[i], unit, 0, c.scale_low, c.add_low, low) +
                   dot_block(format, units[i], unit, 1, c.scale_high, c.add_high, high);
    }
}

// Where the rows of a tile begin: those of the gate, then those of `up`.
INLINE void rows_of(Shape s, int format, Tile tile, global const uchar *up,
                    global const uchar **rows) {
#pragma unroll
    for (int i = 0; i < s.rows; i++) {
        size_t at = (size_t)min(tile.row + i, tile.n - 1) * row_bytes(format, s.k);
        rows[i] = tile.w + at;
        if (swiglu(s))
            rows[s.rows + i] = up + at;
    }
}

INLINE void dot_tile(Shape s, int format, Tile tile, global const uchar *up, int part,
                     local const uint *row, float *sums) {
    global const uchar *rows[MAX_SUMS];
    rows_of(s, format, tile, up, rows);
    int first = part * WARP + get_local_id(0) % WARP, step = s.split * WARP;
    if (s.packed && has_units(format)) {
#pragma unroll 2
        for (int unit = 0; unit < s.k / 64; unit += step)
            if (unit + first < s.k / 64)
                dot_unit(s, format, rows, unit + first, row, sums);
        return;
    }
    int passes = (chunks_of(s) + WARP * s.split - 1) / (WARP * s.split);
    if (sums_of(s) <= 2 && chunks_of(s) % step == 0) {
#pragma unroll 4
        for (int pass = 0; pass < passes; pass++)  // several chunks on their way at a time
            dot_chunk(s, format, rows, pass * step + first, row, sums);
        return;
    }
    for (int pass = 0; pass < passes; pass++)
        if (pass * step + first < chunks_of(s))
            dot_chunk(s, format, rows, pass * step + first, row, sums);
}

// The formats are told apart here, so that the code for each is fixed.
INLINE void dot_any(Shape s, Tile tile, global const uchar *up, int part, local const uint *row,
                    float *sums) {
    if (s.w1 != s.w0 && s.n1 > 0 && tile.weight == 1)
        dot_tile(s, s.w1, tile, up, part, row, sums);
    else if (s.w2 != s.w0 && s.n2 > 0 && tile.weight == 2)
        dot_tile(s, s.w2, tile, up, part, row, sums);
    else
        dot_tile(s, s.w0, tile, up, part, row, sums);
}

// The sums of all lanes and of the warps that share a tile, then the epilogue, by one item a
// result. Slot i of the group has tile first + i * stride.
INLINE void store_sums(Shape s, Operands o, const float *sums, int first, int stride, Desk desk) {
    int item = get_local_id(0), warp = item / WARP;
#pragma unroll
    for (int i = 0; i < sums_of(s); i++) {
        float sum = warp_sum(sums[i], desk.scratch);
        if (item % WARP == 0)
            desk.results[warp * MAX_SUMS + i] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    int slot = item / s.rows, at = first + slot * stride;
    Tile tile = tile_at(s, o, at);
    if (slot < WARPS / s.split && at < tile_count(s) && tile.row + item % s.rows < tile.n) {
        float sum = 0.0f, up = 0.0f;
        for (int part = 0; part < s.split; part++) {
            local const float *found = desk.results + (slot * s.split + part) * MAX_SUMS;
            sum += found[item % s.rows];
            up += swiglu(s) ? found[s.rows + item % s.rows] : 0.0f;
        }
        int column = tile.column + item % s.rows;
        if (swiglu(s))
            sum = sum / (1.0f + exp(-sum)) * up;
        if (s.epilogue == EPILOGUE_add)
            sum += o.residual[column];
        o.y[column] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// The tile of this item's warp in a round of the group.
INLINE Tile own_tile(Shape s, Operands o, int first, int stride) {
    int slot = get_local_id(0) / WARP / s.split;
    return tile_at(s, o, min(first + slot * stride, tile_count(s) - 1));
}

INLINE void mat_vec(Shape s, Operands o, Desk desk) {
    int stride = get_num_groups(0), part = get_local_id(0) / WARP % s.split;
    load_row(s, o, desk);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int first = get_group_id(0); first < tile_count(s); first += WARPS / s.split * stride) {
        float sums[MAX_SUMS] = {0.0f, 0.0f, 0.0f, 0.0f};
        dot_any(s, own_tile(s, o, first, stride), o.w1, part, desk.row, sums);
        store_sums(s, o, sums, first, stride, desk);
    }
}
#endif
