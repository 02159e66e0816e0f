// y = x w for few rows of x, one at a time.

#include "nv_mat_vec.h"

KERNEL nv_mul_mat_vec(int m, int x_stride, int x_offset, int r_stride, int r_offset, int y_stride,
                      int y_offset, float eps, global const float *x, global const float *norm_w,
                      global const uchar *w0, global const uchar *w1, global const uchar *w2,
                      global const float *residual, global float *y) {
    local uint row[ROW_WORDS(K, PACKED)] __attribute__((aligned(16)));
    local float results[WARPS * MAX_SUMS], scratch[LX];
    const Shape shape = {FORMAT(W0), FORMAT(W1), FORMAT(W2), K, N0, N1, N2,
                         EPILOGUE_OF(EPILOGUE), NORM, PACKED, ROWS, SPLIT};
    int token = get_group_id(1);
    if (token >= m)
        return;
    Operands operands = {x + x_offset + token * x_stride, norm_w,
                         residual + r_offset + token * r_stride, w0, w1, w2,
                         y + y_offset + token * y_stride, eps};
    Desk desk = {row, results, scratch};
    mat_vec(shape, operands, desk);
}
