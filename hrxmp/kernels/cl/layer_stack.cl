// Transformer layers for one row in one launch, one after the other, on CPU devices. What they read
// and write stands in a table.

#include "layer.h"

OF_VECTORS
kernel void layer_stack(int m, int capacity, float eps, float scale, float freq_base,
                        float freq_scale, int layers, global const Layer *addresses,
                        global atomic_int *state) {
    local Desk desk;
    if (m == 0)
        return;
    rope_table(addresses->positions[0], freq_base, freq_scale, addresses->factors, desk.cosines,
               desk.sines);
    for (int l = 0; l < layers; l++) {
        const Layer layer = addresses[l], next = addresses[min(l + 1, layers - 1)];
        run_layer(layer, qkv_group(next, BEGIN(QKV_GROUPS, FIRST)), capacity, eps, scale, &desk,
                  COUNTERS(state, l * PHASES));
    }
    leave(state, layers * PHASES);
}
