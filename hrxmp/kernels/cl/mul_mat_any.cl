// y = x w for any device, any number of rows x and both layouts: LX lanes own a row of w each, LY
// work-items share a row's elements of k and add up in local memory.

#include "mul_mat.h"

#define STEP 4

// Products of one row with x, of elements slice * STEP onwards in strides of LY * STEP.
inline float partial_dot(const int type, global const uchar *w, int row, global const float *x, int slice) {
    float sum = 0.0f;
    if (!QUANTIZED(type)) {
        for (int k = slice; k < K; k += LY)
            sum += element(type, PASTE(LAYOUT_, LAYOUT), K, w, row, k) * x[k];
        return sum;
    }
    global const uchar *group = row_group(type, K, w, row / 16);
    int lane = row % 16;
    for (int k = slice * STEP; k < K; k += LY * STEP) {
        int block = k / 32;
        uint quants = lane_quants(type, group, lane, block, k % 32 / 4);
        float scale = lane_scale(type, K, group, lane, block, k % 32 / SUB(type));
        float4 value = vload4(0, x + k);
        sum += scale * dot(convert_float4(as_uchar4(quants)), value) +
               lane_offset(type, K, group, lane, block, scale) *
                   (value.x + value.y + value.z + value.w);
    }
    return sum;
}

// The sum over all slices of a row, for slice 0.
inline float row_sum(float partial, local float *sums) {
    int lane = get_local_id(0), slice = get_local_id(1);
    barrier(CLK_LOCAL_MEM_FENCE);
    sums[slice * LX + lane] = partial;
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    if (slice == 0)
        for (int i = 0; i < LY; i++)
            sum += sums[i * LX + lane];
    return sum;
}

__attribute__((reqd_work_group_size(LX, LY, LZ)))
kernel void mul_mat_any(int m, int x_stride, int x_offset, int r_stride, int r_offset, int y_stride,
                        int y_offset, global const float *x, global const uchar *w0,
                        global const uchar *w1, global const uchar *w2,
                        global const float *residual, global float *y) {
    local float sums[LX * LY];
    int column = get_global_id(0), token = get_group_id(1), slice = get_local_id(1);
    if (token >= m)
        return;
    int second = column - N0, third = second - N1;
    bool exists = column < (SWIGLU ? N0 : N0 + N1 + N2);
    x += x_offset + token * x_stride;
    float partial = 0.0f;
    if (exists && (SWIGLU || second < 0))
        partial = partial_dot(TYPE0, w0, column, x, slice);
    else if (exists && third < 0)
        partial = partial_dot(TYPE1, w1, second, x, slice);
    else if (exists)
        partial = partial_dot(TYPE2, w2, third, x, slice);
    float sum = row_sum(partial, sums);
#if SWIGLU
    float up = row_sum(exists ? partial_dot(TYPE1, w1, column, x, slice) : 0.0f, sums);
    sum = sum / (1.0f + exp(-sum)) * up;
#endif
    if (slice || !exists)
        return;
#if ADD
    sum += residual[r_offset + token * r_stride + column];
#endif
    y[y_offset + token * y_stride + column] = sum;
}
