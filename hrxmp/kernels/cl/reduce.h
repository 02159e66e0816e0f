// Reductions over a work-group of LX items (a power of two); every item gets the result.
// `scratch` is local memory of LX elements, which may be used again at once.

#define GROUP_REDUCE(combine)                                            \
    const int item = get_local_id(0);                                    \
    scratch[item] = value;                                               \
    for (int half_size = LX / 2; half_size > 0; half_size /= 2) {        \
        barrier(CLK_LOCAL_MEM_FENCE);                                    \
        if (item < half_size)                                            \
            scratch[item] = combine(scratch[item], scratch[item + half_size]); \
    }                                                                    \
    barrier(CLK_LOCAL_MEM_FENCE);                                        \
    value = scratch[0];                                                  \
    barrier(CLK_LOCAL_MEM_FENCE);                                        \
    return value

#define SUM_OF(a, b) ((a) + (b))

inline float group_sum(float value, local float *scratch) { GROUP_REDUCE(SUM_OF); }
inline float group_max(float value, local float *scratch) { GROUP_REDUCE(fmax); }

// Each item's columns c of a row of `cols`, LX apart; `item` is the local id. The loop's end is the
// same for all items: after an early return, PoCL 3.1 lets a loop whose end differs between items
// write far outside its buffers.
#define OVER_ROW(c, cols)                                                          \
    for (int c##_start = 0, c = item; c##_start < (cols); c##_start += LX, c += LX) \
        if (c < (cols))
