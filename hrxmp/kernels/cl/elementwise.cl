// Element by element: axes 0 and 2 of the index space are the last axis of the tensors, axis 1 the
// others.
#include "common.h"

// Position of row (r0, r1, r2) of a tensor with strides name0.. and offset name_offset, in elements.
#define ROW(name) (name##_offset + r0 * name##0 + r1 * name##1 + r2 * name##2)
#define SPLIT_ROW(row)                         \
    const int r2 = (row) % n2;                 \
    const int r1 = (row) / n2 % n1;            \
    const int r0 = (row) / n2 / n1

#define BINARY_add(a, b) ((a) + (b))
#define BINARY_sub(a, b) ((a) - (b))
#define BINARY_mul(a, b) ((a) * (b))
#define BINARY_div(a, b) ((a) / (b))

#define UNARY_silu(x) ((x) / (1.0f + exp(-(x))))
#define UNARY_scale(x) ((x) * factor + bias)

// y = a OP b. A_STEP, B_STEP, Y_STEP: stride of the last axis, a number or the argument's name.
#ifdef ENTRY_binary
KERNEL binary(
    const int cols, const int rows, const int n1, const int n2,
    const int a_offset, const int a0, const int a1, const int a2, const int a3,
    const int b_offset, const int b0, const int b1, const int b2, const int b3,
    const int y_offset, const int y0, const int y1, const int y2, const int y3,
    global const float *a, global const float *b, global float *y)
{
    const int col = COLUMN, row = get_global_id(1);
    if (col >= cols || row >= rows) return;
    SPLIT_ROW(row);
    const float u = a[ROW(a) + col * A_STEP], v = b[ROW(b) + col * B_STEP];
    y[ROW(y) + col * Y_STEP] = JOIN(BINARY_, OP)(u, v);
}
#endif

// y = OP(x) over contiguous elements.
#ifdef ENTRY_unary
KERNEL unary(
    const int count, const int x_offset, const int y_offset, const float factor, const float bias,
    global const float *x, global float *y)
{
    const int i = COLUMN;
    if (i >= count) return;
    const float v = x[x_offset + i];
    y[y_offset + i] = JOIN(UNARY_, OP)(v);
}
#endif

// y = silu(gate) * up over rows.
#ifdef ENTRY_swiglu
KERNEL swiglu(
    const int cols, const int rows,
    const int gate_stride, const int gate_offset, const int up_stride, const int up_offset,
    const int y_stride, const int y_offset,
    global const float *gate, global const float *up, global float *y)
{
    const int col = COLUMN, row = get_global_id(1);
    if (col >= cols || row >= rows) return;
    const float g = gate[gate_offset + row * gate_stride + col];
    y[y_offset + row * y_stride + col] = UNARY_silu(g) * up[up_offset + row * up_stride + col];
}
#endif

// y = x, converted from SRC to DST. X_STEP, Y_STEP as above.
#ifdef ENTRY_cpy
KERNEL cpy(
    const int cols, const int rows, const int n1, const int n2,
    const int x_offset, const int x0, const int x1, const int x2, const int x3,
    const int y_offset, const int y0, const int y1, const int y2, const int y3,
    global const TYPE(SRC) *x, global TYPE(DST) *y)
{
    const int col = COLUMN, row = get_global_id(1);
    if (col >= cols || row >= rows) return;
    SPLIT_ROW(row);
    STORE(DST, y, ROW(y) + col * Y_STEP, LOAD(SRC, x, ROW(x) + col * X_STEP));
}
#endif
