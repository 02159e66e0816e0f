// Rows picked from a table, or put into a cache, by run-time indices.
// Axes 0 and 2 of the index space are the column, axis 1 the row of ids.
#include "common.h"

// y[row] = table[ids[row]] for a weight matrix of any format; an id outside it gives NaNs instead
// of a fault.
#ifdef ENTRY_get_rows
#include "blocks.h"

KERNEL get_rows(
    const int rows, const int table_rows, const int y_stride, const int y_offset,
    global const uchar *table, global const int *ids, global float *y)
{
    const int col = COLUMN, row = get_global_id(1);
    if (col >= K || row >= rows) return;
    const int id = ids[row];
    const bool inside = id >= 0 && id < table_rows;
    y[y_offset + row * y_stride + col] = inside ? weight_value(table, id, col) : NAN;
}
#endif

// cache[ids[row]] = x[row], converted to DST; an id outside the cache writes nothing.
#ifdef ENTRY_set_rows
KERNEL set_rows(
    const int rows, const int cache_rows, const int x_stride, const int x_offset,
    const int cache_stride, const int cache_offset,
    global const float *x, global const int *ids, global TYPE(DST) *cache)
{
    const int col = COLUMN, row = get_global_id(1);
    if (col >= K || row >= rows) return;
    const int id = ids[row];
    if (id < 0 || id >= cache_rows) return;
    const float v = x[x_offset + row * x_stride + col];
    STORE(DST, cache + (long)id * cache_stride + cache_offset, col, v);
}
#endif
