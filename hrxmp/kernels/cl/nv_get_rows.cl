// y[row] = table[ids[row]] for quantised tables: one item a chunk of 32 weights.

#include "nv_blocks.h"

KERNEL nv_get_rows(int rows, int table_rows, int y_stride, int y_offset, global const uchar *table,
                   global const int *ids, global float *y) {
    int chunk = get_global_id(0), row = get_global_id(1);
    if (chunk < K / 32 && row < rows)
        get_chunk(FORMAT(WTYPE), K, chunk, ids[row], table_rows, table,
                  y + y_offset + row * y_stride);
}
