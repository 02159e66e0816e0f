// The product of small matrices in registers, for CPU devices: TILE rows times PANEL vectors of 16.

#ifndef TILE_H
#define TILE_H

// sums[t][.] += x[t][0..depth) * b[0..depth)[.] for `rows` rows; `rows` and PANEL are constants
// where this is inlined, so that the sums stay in registers. b has PANEL * 16 columns of b_stride,
// sums rows of sums_stride, both multiples of 16.
#define DEFINE_MULTIPLY(NAME, SPACE)                                                               \
    inline void NAME(const int rows, SPACE const float *x, int x_stride, local const float *b,     \
                     int b_stride, int depth, local float *sums, int sums_stride) {                \
        float16 sum[TILE][PANEL];                                                                  \
        _Pragma("unroll") for (int t = 0; t < rows; t++)                                           \
            _Pragma("unroll") for (int p = 0; p < PANEL; p++)                                      \
                sum[t][p] = vload16(p, sums + t * sums_stride);                                    \
        for (int k = 0; k < depth; k++) {                                                          \
            float16 row[PANEL];                                                                    \
            _Pragma("unroll") for (int p = 0; p < PANEL; p++)                                      \
                row[p] = vload16(p, b + k * b_stride);                                             \
            _Pragma("unroll") for (int t = 0; t < rows; t++) {                                     \
                float16 value = x[t * x_stride + k];                                               \
                _Pragma("unroll") for (int p = 0; p < PANEL; p++)                                  \
                    sum[t][p] = mad(value, row[p], sum[t][p]);                                     \
            }                                                                                      \
        }                                                                                          \
        _Pragma("unroll") for (int t = 0; t < rows; t++)                                           \
            _Pragma("unroll") for (int p = 0; p < PANEL; p++)                                      \
                vstore16(sum[t][p], p, sums + t * sums_stride);                                    \
    }

// The same for any number of rows.
#define DEFINE_MULTIPLY_ALL(NAME, MULTIPLY, SPACE)                                                 \
    inline void NAME(int rows, SPACE const float *x, int x_stride, local const float *b,           \
                     int b_stride, int depth, local float *sums, int sums_stride) {                \
        int t = 0;                                                                                 \
        for (; t + TILE <= rows; t += TILE)                                                        \
            MULTIPLY(TILE, x + t * x_stride, x_stride, b, b_stride, depth,                         \
                     sums + t * sums_stride, sums_stride);                                         \
        for (; t + 2 <= rows; t += 2)                                                              \
            MULTIPLY(2, x + t * x_stride, x_stride, b, b_stride, depth, sums + t * sums_stride,    \
                     sums_stride);                                                                 \
        if (t < rows)                                                                              \
            MULTIPLY(1, x + t * x_stride, x_stride, b, b_stride, depth, sums + t * sums_stride,    \
                     sums_stride);                                                                 \
    }
#endif
