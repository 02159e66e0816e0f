// y = x w for many rows of x, on the tensor cores. A work-group of eight warps makes 128 tokens by
// ROWS weight rows, 64 or 32; it unpacks the weights of STEP elements into bytes in local memory,
// beside the packed rows of x, and each warp multiplies half of the rows by 32 tokens.
//
// Products are exact integers: x is 256 * high + low, so two byte products make one. A block's sum
// becomes a float when its scales are known: each 32 elements, each 16 of Q6_K. FORM ptx only.

#include "nv_blocks.h"
#include "nv_row.h"

#define EPILOGUE_none 0
#define EPILOGUE_add 1
#define EPILOGUE_swiglu 2
#define SWIGLU (JOIN(EPILOGUE_, EPILOGUE) == EPILOGUE_swiglu)
#define ADD (JOIN(EPILOGUE_, EPILOGUE) == EPILOGUE_add)

#define TOKENS 128
#define FRAGMENTS (ROWS / 32)  // of 16 rows, of a warp
#define PITCH (STEP + 16)  // bytes from row to row: ldmatrix meets each bank once
#define RUNS (STEP / 16)
#define TILES_OF(n) (SWIGLU ? ((n) + 31) / 32 : ((n) + ROWS - 1) / ROWS)

typedef struct {
    uchar weights[ROWS * PITCH], high[TOKENS * PITCH], low[TOKENS * PITCH];
    float2 scales[RUNS * ROWS];  // scale and addend of each run of each row
    float x_scales[RUNS / 2 * TOKENS], x_sums[RUNS * TOKENS];
} Stage;

typedef struct {
    global const uchar *w, *up;
    int format, row, n, column;
} Tile;

INLINE Tile tile_at(int tile, global const uchar *w0, global const uchar *w1,
                    global const uchar *w2) {
    int second = tile - TILES_OF(N0), third = second - TILES_OF(N1);
    if (SWIGLU)
        return (Tile){w0, w1, FORMAT(W0), tile * 32, N0, tile * 32};
    if (second < 0)
        return (Tile){w0, w0, FORMAT(W0), tile * ROWS, N0, tile * ROWS};
    if (third < 0)
        return (Tile){w1, w1, FORMAT(W1), second * ROWS, N1, N0 + second * ROWS};
    return (Tile){w2, w2, FORMAT(W2), third * ROWS, N2, N0 + N1 + third * ROWS};
}

// A stage's row r: with SWIGLU 16 rows of the gate alternate with 16 of `up`.
INLINE int weight_row(int r) { return SWIGLU ? r / 32 * 16 + r % 16 : r; }

INLINE void stage_run(local Stage *stage, int r, int at, uint4 bytes, float scale, float add) {
    *(local uint4 *)(stage->weights + r * PITCH + at) = bytes;
    stage->scales[at / 16 * ROWS + r] = (float2)(scale, add);
}

INLINE void stage_weights(int format, Tile tile, int start, local Stage *stage) {
    for (int i = get_local_id(0); i < ROWS * STEP / 32; i += LX) {
        int r = i / (STEP / 32), chunk = start / 32 + i % (STEP / 32);
        int row = min(tile.row + weight_row(r), tile.n - 1);
        global const uchar *w = SWIGLU && r / 16 % 2 ? tile.up : tile.w;
        Chunk c = chunk_of(format, w + (size_t)row * row_bytes(format, K), chunk, K);
        stage_run(stage, r, low_run(format, chunk) - start, c.low, c.scale_low, c.add_low);
        stage_run(stage, r, high_run(format, chunk) - start, c.high, c.scale_high, c.add_high);
    }
}

INLINE void stage_x(global const uint *x, int token, int m, int start, local Stage *stage) {
    int item = get_local_id(0);
    for (int i = item; i < TOKENS * RUNS; i += LX) {
        int t = i / RUNS, run = i % RUNS;
        global const uint *from = x + min(token + t, m - 1) * PACKED_STRIDE(K) + start / 4 + run * 4;
        *(local uint4 *)(stage->high + t * PITCH + run * 16) = *(global const uint4 *)from;
        *(local uint4 *)(stage->low + t * PITCH + run * 16) = *(global const uint4 *)(from + K / 4);
    }
    for (int i = item; i < TOKENS * RUNS; i += LX) {
        int t = i / RUNS, run = i % RUNS;
        global const float *scales =
            (global const float *)(x + min(token + t, m - 1) * PACKED_STRIDE(K) + K / 2);
        stage->x_sums[run * TOKENS + t] = scales[K / 32 + start / 16 + run];
        if (run % 2 == 0)
            stage->x_scales[run / 2 * TOKENS + t] = scales[start / 32 + run / 2];
    }
}

// Four 8 x 16-byte matrices; each lane gives the address of one row of one of them.
INLINE uint4 load_matrices(local const uchar *p) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"((uint)(size_t)p)
                 : "memory");
    return v;
}

INLINE int4 multiply32(uint4 a, uint2 b, int4 c) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c.x), "+r"(c.y), "+r"(c.z), "+r"(c.w)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
    return c;
}

INLINE int4 multiply16(uint2 a, uint b, int4 c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
                 "{%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+r"(c.x), "+r"(c.y), "+r"(c.z), "+r"(c.w)
                 : "r"(a.x), "r"(a.y), "r"(b));
    return c;
}

// sum += scale of the row * scale of the token * c + addend of the row * sum of the token, for the
// rows `upper`, `lower` and the two tokens of this lane.
INLINE float4 add_block(float4 sum, int4 c, float2 upper, float2 lower, float2 x_scale,
                        float2 x_sum) {
    sum.xy += upper.x * x_scale * (float2)((float)c.x, (float)c.y) + upper.y * x_sum;
    sum.zw += lower.x * x_scale * (float2)((float)c.z, (float)c.w) + lower.y * x_sum;
    return sum;
}

// One block of 32 elements: this warp's FRAGMENTS x 16 rows by 4 x 8 tokens.
INLINE void multiply_block(bool halves, int block, local const Stage *stage, float4 sums[FRAGMENTS][4]) {
    int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    int rows = warp % 2 * (ROWS / 2), tokens = warp / 2 * 32;
    uint4 a[FRAGMENTS], high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = rows + i * 16 + lane % 16, token = tokens + i * 16 + lane / 16 * 8 + lane % 8;
        int at = token * PITCH + block * 32 + lane / 8 % 2 * 16;
        if (i < FRAGMENTS)
            a[i] = load_matrices(stage->weights + row * PITCH + block * 32 + lane / 16 * 16);
        high[i] = load_matrices(stage->high + at);
        low[i] = load_matrices(stage->low + at);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint2 h = j % 2 ? high[j / 2].zw : high[j / 2].xy, l = j % 2 ? low[j / 2].zw : low[j / 2].xy;
        int token = tokens + j * 8 + lane % 4 * 2;
        float2 x_scale = *(local const float2 *)(stage->x_scales + block * TOKENS + token);
        local const float *x_sums = stage->x_sums + 2 * block * TOKENS + token;
        float2 first = *(local const float2 *)x_sums, second = *(local const float2 *)(x_sums + TOKENS);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) {
            local const float2 *scales = stage->scales + 2 * block * ROWS + rows + i * 16 + lane / 4;
            if (halves) {
                int4 c = multiply16(a[i].xy, l.x, multiply16(a[i].xy, h.x, (int4)0) << 8);
                sums[i][j] = add_block(sums[i][j], c, scales[0], scales[8], x_scale, first);
                c = multiply16(a[i].zw, l.y, multiply16(a[i].zw, h.y, (int4)0) << 8);
                scales += ROWS;
                sums[i][j] = add_block(sums[i][j], c, scales[0], scales[8], x_scale, second);
            } else {
                int4 c = multiply32(a[i], l, multiply32(a[i], h, (int4)0) << 8);
                sums[i][j] = add_block(sums[i][j], c, scales[0], scales[8], x_scale, first + second);
            }
        }
    }
}

INLINE void multiply(int format, Tile tile, global const uint *x, int token, int m,
                     local Stage *stage, float4 sums[FRAGMENTS][4]) {
    for (int start = 0; start < K; start += STEP) {
        stage_weights(format, tile, start, stage);
        stage_x(x, token, m, start, stage);
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll 2
        for (int block = 0; block < STEP / 32; block++)
            multiply_block(format == FORMAT_q6_k, block, stage, sums);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

INLINE void store_one(float sum, float up, int token, int column, int m, Tile tile, int r_stride,
                      int y_stride, global const float *residual, global float *y) {
    if (token >= m || column >= tile.n)
        return;
    column += tile.column - tile.row;
#if SWIGLU
    sum = sum / (1.0f + exp(-sum)) * up;
#elif ADD
    sum += residual[token * r_stride + column];
#endif
    y[token * y_stride + column] = sum;
}

KERNEL nv_mul_mat_tile(int m, int r_stride, int r_offset, int y_stride, int y_offset,
                       global const uint *x, global const uchar *w0, global const uchar *w1,
                       global const uchar *w2, global const float *residual, global float *y) {
    local Stage stage __attribute__((aligned(16)));
    int token = get_group_id(0) * TOKENS;
    if (token >= m)
        return;
    Tile tile = tile_at(get_group_id(1), w0, w1, w2);
    float4 sums[FRAGMENTS][4];
#pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            sums[i][j] = 0.0f;
    if (FORMAT(W1) != FORMAT(W0) && N1 > 0 && tile.format == FORMAT(W1))
        multiply(FORMAT(W1), tile, x, token, m, &stage, sums);
    else if (FORMAT(W2) != FORMAT(W0) && N2 > 0 && tile.format == FORMAT(W2))
        multiply(FORMAT(W2), tile, x, token, m, &stage, sums);
    else
        multiply(FORMAT(W0), tile, x, token, m, &stage, sums);
    residual += r_offset;
    y += y_offset;
    int lane = get_local_id(0) % WARP, warp = get_local_id(0) / WARP;
    token += warp / 2 * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < (SWIGLU ? 1 : FRAGMENTS); i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int column = tile.row + weight_row(warp % 2 * (ROWS / 2) + i * 16 + lane / 4);
            float4 v = sums[i][j], up = sums[FRAGMENTS - 1][j];
            int t = token + j * 8;
            store_one(v.x, up.x, t, column, m, tile, r_stride, y_stride, residual, y);
            store_one(v.y, up.y, t + 1, column, m, tile, r_stride, y_stride, residual, y);
            store_one(v.z, up.z, t, column + 8, m, tile, r_stride, y_stride, residual, y);
            store_one(v.w, up.w, t + 1, column + 8, m, tile, r_stride, y_stride, residual, y);
        }
}
