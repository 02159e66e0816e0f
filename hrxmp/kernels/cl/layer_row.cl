// A transformer layer for one row in one launch, on CPU devices.

#include "layer.h"

OF_VECTORS
kernel void layer_row(int m, int capacity, float eps, float scale, float freq_base,
                      float freq_scale, int x_offset, int y_offset, global const float *x,
                      global const float *attn_norm, global const uchar *wq,
                      global const uchar *wk, global const uchar *wv, global const uchar *wo,
                      global const float *ffn_norm, global const uchar *wg,
                      global const uchar *wu, global const uchar *wd, global const int *positions,
                      global const float *factors, global cached *k_cache, global cached *v_cache,
                      global Scratch *scratch, global float *y, global atomic_int *state) {
    local Desk desk;
    if (m == 0)
        return;
    Layer layer = {x + x_offset, attn_norm, wq, wk, wv, wo, ffn_norm, wg, wu, wd, positions, factors,
                   k_cache, v_cache, scratch, y + y_offset};
    rope_table(positions[0], freq_base, freq_scale, factors, desk.cosines, desk.sines);
    run_layer(layer, wq, capacity, eps, scale, &desk, state);
    leave(state, PHASES);
}
