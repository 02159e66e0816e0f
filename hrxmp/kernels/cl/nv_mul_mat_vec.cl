// y = x w for one row of x at a time: a work-group brings the row into local memory once, its warps
// take ROWS rows of the weights each, SPLIT warps share the elements of a row.
//
// W0, W1, W2 name the formats; with PACKED all are quantised, else all are f16 or f32. Neighbouring
// tiles go to different groups, and the groups stride over them: few groups bring few copies of the
// row, and all of the device reads at any time.

#include "nv_blocks.h"
#include "nv_row.h"

#define EPILOGUE_none 0
#define EPILOGUE_add 1
#define EPILOGUE_swiglu 2
#define SWIGLU (JOIN(EPILOGUE_, EPILOGUE) == EPILOGUE_swiglu)
#define ADD (JOIN(EPILOGUE_, EPILOGUE) == EPILOGUE_add)

#define TILES_OF(n) (((n) + ROWS - 1) / ROWS)
#define TILES (SWIGLU ? TILES_OF(N0) : TILES_OF(N0) + TILES_OF(N1) + TILES_OF(N2))
#define SLOTS (WARPS / SPLIT)
#define SUMS (SWIGLU ? 2 * ROWS : ROWS)
#define PASSES ((K + 4 * LX - 1) / (4 * LX))
#define CHUNKS (PACKED ? K / 32 : FORMAT(W0) == FORMAT_f16 ? K / 8 : K / 4)
#define CHUNK_PASSES ((CHUNKS + WARP * SPLIT - 1) / (WARP * SPLIT))

// ROWS rows of one weight.
typedef struct {
    global const uchar *w;
    int weight, row, n, column;  // which one, first row, rows that exist, first column of y
} Tile;

inline Tile tile_at(int tile, global const uchar *w0, global const uchar *w1,
                    global const uchar *w2) {
    int second = tile - TILES_OF(N0), third = second - TILES_OF(N1);
    if (SWIGLU || second < 0)
        return (Tile){w0, 0, tile * ROWS, N0, tile * ROWS};
    if (third < 0)
        return (Tile){w1, 1, second * ROWS, N1, N0 + second * ROWS};
    return (Tile){w2, 2, third * ROWS, N2, N0 + N1 + third * ROWS};
}

inline void load_row(global const float *x, global const float *norm_w, float eps, local uint *row,
                     local float *scratch) {
    float4 values[PASSES];
    float squares = 0.0f;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int element = (pass * LX + get_local_id(0)) * 4;
        values[pass] = element < K ? vload4(0, x + element) : (float4)0.0f;
        squares += dot(values[pass], values[pass]);
    }
#if NORM
    float factor = 1.0f / sqrt(group_total(squares, scratch) / K + eps);
#endif
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int element = (pass * LX + get_local_id(0)) * 4;
#if NORM
        if (element < K)
            values[pass] *= factor * vload4(0, norm_w + element);
#endif
#if PACKED
        put_packed(row, values[pass], element, K, scratch);
#else
        if (element < K)
            vstore4(values[pass], 0, (local float *)row + element);
#endif
    }
}

inline void dot_packed(int format, global const uchar **w, int part, local const uint *row,
                       float *sums) {
    for (int pass = 0; pass < CHUNK_PASSES; pass++) {
        int chunk = (pass * SPLIT + part) * WARP + get_local_id(0) % WARP;
        if (chunk < CHUNKS) {
            Run low = run_at(row, low_run(format, chunk), K);
            Run high = run_at(row, high_run(format, chunk), K);
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                Chunk c = chunk_of(format, w[i], chunk, K);
                sums[i] += run_dot(c.low, c.scale_low, c.add_low, low) +
                           run_dot(c.high, c.scale_high, c.add_high, high);
            }
        }
    }
}

inline void dot_floats(int format, global const uchar **w, int part, local const uint *row,
                       float *sums) {
    local const float *x = (local const float *)row;
    for (int pass = 0; pass < CHUNK_PASSES; pass++) {
        int chunk = (pass * SPLIT + part) * WARP + get_local_id(0) % WARP;
        if (chunk < CHUNKS) {
#pragma unroll
            for (int i = 0; i < SUMS; i++) {
                uint4 v = load_stream(w[i] + chunk * 16);
                if (format == FORMAT_f16) {
                    local const float *p = x + chunk * 8;
                    sums[i] += dot((float4)(halves_of(v.x), halves_of(v.y)), vload4(0, p)) +
                               dot((float4)(halves_of(v.z), halves_of(v.w)), vload4(1, p));
                } else {
                    sums[i] += dot(as_float4(v), vload4(chunk, x));
                }
            }
        }
    }
}

// Where the rows of a tile begin: those of the gate, then those of `up`.
inline void rows_of(int format, Tile tile, global const uchar *up, global const uchar **rows) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        size_t at = (size_t)min(tile.row + i, tile.n - 1) * row_bytes(format, K);
        rows[i] = tile.w + at;
        if (SWIGLU)
            rows[SUMS - ROWS + i] = up + at;
    }
}

inline void dot_tile(int format, Tile tile, global const uchar *up, int part,
                     local const uint *row, float *sums) {
    global const uchar *rows[SUMS];
    rows_of(format, tile, up, rows);
#if PACKED
    dot_packed(format, rows, part, row, sums);
#else
    dot_floats(format, rows, part, row, sums);
#endif
}

// Bring a tile near while the row is still being prepared.
inline void warm_tile(Tile tile, global const uchar *up, int part) {
#if PTX
    int format = tile.weight == 0 ? FORMAT(W0) : tile.weight == 1 ? FORMAT(W1) : FORMAT(W2);
    global const uchar *rows[SUMS];
    rows_of(format, tile, up, rows);
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        for (int at = (part * WARP + get_local_id(0) % WARP) * 128; at < row_bytes(format, K);
             at += SPLIT * WARP * 128)
            prefetch_line(rows[i] + at);
#endif
}

// The formats are told apart here, so that the code for each is fixed.
inline void dot_any(Tile tile, global const uchar *up, int part, local const uint *row,
                    float *sums) {
    if (FORMAT(W1) != FORMAT(W0) && N1 > 0 && tile.weight == 1)
        dot_tile(FORMAT(W1), tile, up, part, row, sums);
    else if (FORMAT(W2) != FORMAT(W0) && N2 > 0 && tile.weight == 2)
        dot_tile(FORMAT(W2), tile, up, part, row, sums);
    else
        dot_tile(FORMAT(W0), tile, up, part, row, sums);
}

// The sums of all lanes and of the SPLIT warps, then the epilogue, by one item a result. Slot s of
// the group has tile first + s * stride.
inline void store_sums(const float *sums, int first, int stride, local float *results,
                       local float *scratch, global const float *residual, global float *y) {
    int item = get_local_id(0), warp = item / WARP;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        float sum = warp_sum(sums[i], scratch);
        if (item % WARP == 0)
            results[warp * SUMS + i] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    int slot = item / ROWS, at = first + slot * stride;
    Tile tile = tile_at(at, 0, 0, 0);
    if (slot < SLOTS && at < TILES && tile.row + item % ROWS < tile.n) {
        float sum = 0.0f, up = 0.0f;
        for (int part = 0; part < SPLIT; part++) {
            local const float *found = results + (slot * SPLIT + part) * SUMS;
            sum += found[item % ROWS];
            up += found[SUMS - ROWS + item % ROWS];
        }
        int column = tile.column + item % ROWS;
#if SWIGLU
        sum = sum / (1.0f + exp(-sum)) * up;
#elif ADD
        sum += residual[column];
#endif
        y[column] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

KERNEL nv_mul_mat_vec(int m, int x_stride, int x_offset, int r_stride, int r_offset, int y_stride,
                      int y_offset, float eps, global const float *x, global const float *norm_w,
                      global const uchar *w0, global const uchar *w1, global const uchar *w2,
                      global const float *residual, global float *y) {
    local uint row[ROW_WORDS(K, PACKED)] __attribute__((aligned(16)));
    local float results[WARPS * SUMS], scratch[LX];
    int token = get_group_id(1), warp = get_local_id(0) / WARP, part = warp % SPLIT;
    if (token >= m)
        return;
    int stride = get_num_groups(0), first = get_group_id(0);
    Tile tile = tile_at(min(first + warp / SPLIT * stride, TILES - 1), w0, w1, w2);
    warm_tile(tile, w1, part);
    load_row(x + x_offset + token * x_stride, norm_w, eps, row, scratch);
    barrier(CLK_LOCAL_MEM_FENCE);
    residual += r_offset + token * r_stride;
    y += y_offset + token * y_stride;
    for (; first < TILES; first += SLOTS * stride) {
        float sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            sums[i] = 0.0f;
        tile = tile_at(min(first + warp / SPLIT * stride, TILES - 1), w0, w1, w2);
        dot_any(tile, w1, part, row, sums);
        store_sums(sums, first, stride, results, scratch, residual, y);
    }
}
