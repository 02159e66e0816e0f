// One work-group a row: each item walks the row in steps of LX, the group combines.
#include "common.h"
#include "reduce.h"

// y = x / sqrt(mean(x^2) + eps), times w where WEIGHTED.
#ifdef ENTRY_rms_norm
KERNEL rms_norm(
    const int rows, const int x_stride, const int x_offset, const int y_stride, const int y_offset,
    const float eps, global const float *x,
#if WEIGHTED
    global const float *w,
#endif
    global float *y)
{
    local float scratch[LX];
    const int row = get_group_id(1), item = get_local_id(0);
    if (row >= rows) return;
    global const float *in = x + x_offset + row * x_stride;
    global float *out = y + y_offset + row * y_stride;
    float sum = 0.0f;
    OVER_ROW(c, K) sum += in[c] * in[c];
    const float scale = 1.0f / sqrt(group_sum(sum, scratch) / K + eps);
    OVER_ROW(c, K) {
#if WEIGHTED
        out[c] = in[c] * scale * w[c];
#else
        out[c] = in[c] * scale;
#endif
    }
}
#endif

// y = softmax(x * scale + mask) over rows of `cols`; the mask's rows repeat every mask_rows rows.
// May run in place: an item reads an element last before it writes it.
#ifdef ENTRY_soft_max
#if MASKED
#define SCORE(c) (in[c] * scale + bias[c])
#else
#define SCORE(c) (in[c] * scale)
#endif
KERNEL soft_max(
    const int rows, const int cols, const int x_stride, const int x_offset,
    const int mask_rows, const int mask_stride, const int mask_offset,
    const int y_stride, const int y_offset, const float scale, global const float *x,
#if MASKED
    global const float *mask,
#endif
    global float *y)
{
    local float scratch[LX];
    const int row = get_group_id(1), item = get_local_id(0);
    if (row >= rows) return;
    global const float *in = x + x_offset + row * x_stride;
    global float *out = y + y_offset + row * y_stride;
#if MASKED
    global const float *bias = mask + mask_offset + row % mask_rows * mask_stride;
#endif
    float top = -INFINITY;
    OVER_ROW(c, cols) top = fmax(top, SCORE(c));
    top = group_max(top, scratch);
    float sum = 0.0f;
    OVER_ROW(c, cols) {
        const float e = exp(SCORE(c) - top);
        out[c] = e;
        sum += e;
    }
    const float inverse = 1.0f / group_sum(sum, scratch);
    OVER_ROW(c, cols) out[c] *= inverse;
}
#endif

// y[row] = index of the row's largest element; of equal ones the first. NaNs are passed over.
#ifdef ENTRY_argmax
KERNEL argmax(
    const int rows, const int cols, const int x_stride, const int x_offset, const int y_offset,
    global const float *x, global int *y)
{
    local float values[LX];
    local int places[LX];
    const int row = get_group_id(1), item = get_local_id(0);
    if (row >= rows) return;
    global const float *in = x + x_offset + row * x_stride;
    float best = -INFINITY;
    int place = cols;
    OVER_ROW(c, cols) {
        const bool first = in[c] > best || (in[c] == best && c < place);
        best = first ? in[c] : best;
        place = first ? c : place;
    }
    values[item] = best;
    places[item] = place;
    for (int half_size = LX / 2; half_size > 0; half_size /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (item < half_size) {
            const float other = values[item + half_size];
            const int where = places[item + half_size];
            if (other > values[item] || (other == values[item] && where < places[item])) {
                values[item] = other;
                places[item] = where;
            }
        }
    }
    if (item == 0) y[y_offset + row] = places[0] < cols ? places[0] : 0;
}
#endif
