// Rotary position embedding: pair i of a head turns by position * freq_scale / base^(2i / N_DIMS).
// Axis 0 of the index space is the pair, axis 1 the row; an item turns its pair in every head, so
// that the angle is worked out once. May run in place.
#include "common.h"

// Where the two elements of a pair stand: neighbours (norm) or half the rotated part apart (neox).
#if NEOX
#define FIRST(pair) (pair)
#define APART (N_DIMS / 2)
#else
#define FIRST(pair) (2 * (pair))
#define APART 1
#endif

KERNEL rope(
    const int rows, const int x_stride, const int x_offset, const int y_stride, const int y_offset,
    const float freq_base, const float freq_scale, global const float *x,
    global const int *positions,
#if FACTORS
    global const float *factors,
#endif
    global float *y)
{
    const int pair = get_global_id(0), row = get_global_id(1);
    if (row >= rows || pair >= HEAD_DIM / 2) return;
    global const float *in = x + x_offset + row * x_stride;
    global float *out = y + y_offset + row * y_stride;
    if (pair >= N_DIMS / 2) {  // past the rotated part: copied
        for (int head = 0; head < N_HEADS; head++) {
            out[head * HEAD_DIM + 2 * pair] = in[head * HEAD_DIM + 2 * pair];
            out[head * HEAD_DIM + 2 * pair + 1] = in[head * HEAD_DIM + 2 * pair + 1];
        }
        return;
    }
    // In double: at position 8000 a float angle is off by 5e-4 before it is even reduced.
    double angle = positions[row] * (double)freq_scale;
    angle *= exp2(-2.0 * pair / N_DIMS * log2((double)freq_base));
#if FACTORS
    angle /= factors[pair];
#endif
    const double turn = 6.283185307179586476925;
    const float rest = (float)(angle - turn * rint(angle / turn));
    const float c = cos(rest), s = sin(rest);
    for (int head = 0; head < N_HEADS; head++) {
        const int at = head * HEAD_DIM + FIRST(pair);
        const float u = in[at], v = in[at + APART];
        out[at] = u * c - v * s;
        out[at + APART] = u * s + v * c;
    }
}
