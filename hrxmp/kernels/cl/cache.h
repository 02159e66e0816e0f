// The key and value caches: KV_HEADS times `capacity` rows of HEAD_DIM, f32 or f16 (KV). A head's
// rows lie one after the other, as attention reads them.

#ifndef CACHE_H
#define CACHE_H

#define KV_f32 1
#define KV_f16 2
#define CACHE_PASTE_(a, b) a##b
#define CACHE_PASTE(a, b) CACHE_PASTE_(a, b)
#define HALF_CACHE (CACHE_PASTE(KV_, KV) == KV_f16)
#define KV_WIDTH (KV_HEADS * HEAD_DIM)  // elements of k, and of v, beside q
#define SHARED (HEADS / KV_HEADS)  // query heads that share a key head

#if HALF_CACHE
typedef half cached;
#define cache_load(index, p) vload_half(index, p)
#define cache_load16(index, p) vload_half16(index, p)
#define cache_store(value, index, p) vstore_half_rte(value, index, p)
#else
typedef float cached;
#define cache_load(index, p) (p)[index]
#define cache_load16(index, p) vload16(index, p)
#define cache_store(value, index, p) ((p)[index] = (value))
#endif

// Where a row of a head begins.
#define CACHE_ROW(kv_head, row, capacity) (((size_t)(kv_head) * (capacity) + (row)) * HEAD_DIM)
#endif
