// y = x w for any device, any number of rows x and both layouts: LX lanes own a row of w each, LY
// work-items share a row's elements of k and add up in local memory.

#include "mul_mat.h"

#define STEP 4

// Products of one row with x, of elements slice * STEP onwards in strides of LY * STEP.
inline float partial_dot(global const uchar *w, int row, global const float *x, int slice) {
    float sum = 0.0f;
#if QUANTIZED
    global const uchar *group = row_group(w, row / 16);
    int lane = row % 16;
    for (int k = slice * STEP; k < K; k += LY * STEP) {
        int block = k / 32;
        uint quants = lane_quants(group, lane, block, k % 32 / 4);
        float scale = lane_scale(group, lane, block, k % 32 / SUB);
        float4 value = vload4(0, x + k);
        float4 q = convert_float4(as_uchar4(quants));
        sum += scale * dot(q, value) +
               lane_offset(group, lane, block, scale) * (value.x + value.y + value.z + value.w);
    }
#else
    for (int k = slice; k < K; k += LY)
        sum += weight_value(w, row, k) * x[k];
#endif
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
    bool exists = column < (SWIGLU ? N0 : N0 + N1 + N2);
    global const uchar *w = column < N0 || SWIGLU ? w0 : column < N0 + N1 ? w1 : w2;
    int row = column < N0 || SWIGLU ? column : column < N0 + N1 ? column - N0 : column - N0 - N1;
    x += x_offset + token * x_stride;
    float sum = row_sum(exists ? partial_dot(w, row, x, slice) : 0.0f, sums);
#if SWIGLU
    float up = row_sum(exists ? partial_dot(w1, row, x, slice) : 0.0f, sums);
    sum = sum / (1.0f + exp(-sum)) * up;
#endif
    if (slice || !exists)
        return;
#if ADD
    sum += residual[r_offset + token * r_stride + column];
#endif
    y[y_offset + token * y_stride + column] = sum;
}
