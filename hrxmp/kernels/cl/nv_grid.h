// A barrier for all work-groups of a launch. All must be resident at once: a launch has one group a
// multiprocessor. A group that waits for seconds ends the launch with a fault instead of hanging.
//
// `arrived` is zero before the launch, and the last group to leave makes it zero again.

#ifndef NV_GRID_H
#define NV_GRID_H
#include "nv_form.h"

#define MOST_POLLS (1 << 24)

// What this group has written is there for those that see it arrive. One item calls it.
INLINE uint arrive(volatile global uint *arrived) {
#if PTX
    uint before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"((ulong)arrived)
                 : "memory");
    return before;
#else
    return atomic_inc(arrived);
#endif
}

INLINE uint arrivals(volatile global uint *arrived) {
#if PTX
    uint count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(count)
                 : "l"((ulong)arrived)
                 : "memory");
    return count;
#else
    return atomic_add(arrived, 0);
#endif
}

INLINE void give_up(void) {
#if PTX
    asm volatile("trap;");
#endif
}

// Until all groups are here: `count` arrivals since the launch began.
INLINE void meet(volatile global uint *arrived, uint count) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) {
        int polls = 0;
        arrive(arrived);
        while (arrivals(arrived) < count)
            if (++polls > MOST_POLLS)
                give_up();
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

// The end: the last group of `rounds` barriers leaves the counter as it was.
INLINE void leave(volatile global uint *arrived, uint rounds) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0 && arrive(arrived) + 1 == (rounds + 1) * get_num_groups(0))
        *arrived = 0;
}
#endif
