// y[row] = table[ids[row]] for quantised tables: one item a chunk of 32 weights. An id outside the
// table gives NaNs instead of a fault.

#include "nv_blocks.h"

inline void store_run(uint4 quants, float scale, float add, global float *y) {
    uint words[4] = {quants.x, quants.y, quants.z, quants.w};
    for (int i = 0; i < 4; i++)
        vstore4(convert_float4(as_char4(words[i])) * scale + add, i, y);
}

KERNEL nv_get_rows(int rows, int table_rows, int y_stride, int y_offset, global const uchar *table,
                   global const int *ids, global float *y) {
    int chunk = get_global_id(0), row = get_global_id(1);
    if (chunk >= K / 32 || row >= rows)
        return;
    int id = ids[row];
    bool inside = id >= 0 && id < table_rows;
    size_t at = inside ? (size_t)id * row_bytes(FORMAT(WTYPE), K) : 0;
    Chunk c = chunk_of(FORMAT(WTYPE), table + at, chunk, K);
    y += y_offset + row * y_stride;
    float good = inside ? 0.0f : NAN;
    store_run(c.low, c.scale_low, c.add_low + good, y + low_run(FORMAT(WTYPE), chunk));
    store_run(c.high, c.scale_high, c.add_high + good, y + high_run(FORMAT(WTYPE), chunk));
}
