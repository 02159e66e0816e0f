// Rows of x as the tile kernel takes them, one row a work-group: what nv_row.h keeps in local memory,
// in global memory. With NORM the row is RMS-normalised first.

#include "nv_row.h"

#define PASSES ((K + 4 * LX - 1) / (4 * LX))

KERNEL nv_pack_rows(int m, int x_stride, int x_offset, float eps, global const float *x,
                    global const float *norm_w, global uint *y) {
    local uint row[PACKED_WORDS(K, 0)] __attribute__((aligned(16)));
    local float scratch[LX];
    int token = get_group_id(0), item = get_local_id(0);
    if (token >= m)
        return;
    x += x_offset + token * x_stride;
    float4 values[PASSES];
    float squares = 0.0f, factor = 1.0f;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int element = (pass * LX + item) * 4;
        values[pass] = element < K ? vload4(0, x + element) : (float4)0.0f;
        squares += dot(values[pass], values[pass]);
    }
#if NORM
    factor = 1.0f / sqrt(group_total(squares, scratch) / K + eps);
#endif
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        int element = (pass * LX + item) * 4;
#if NORM
        if (element < K)
            values[pass] *= factor * vload4(0, norm_w + element);
#endif
        put_packed(row, values[pass], element, K, 0, scratch);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    y += token * PACKED_STRIDE(K);
    for (int i = item; i < PACKED_WORDS(K, 0); i += LX)
        y[i] = row[i];
}
