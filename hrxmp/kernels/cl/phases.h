// Phases of one launch: work-groups claim the parts of a phase in turn, and go on to the next phase
// when all parts are finished.
//
// Nobody waits for a work-group that does not run: a part is waited for only when it was claimed,
// and whoever claimed it is running. So one work-group alone does everything, however late the
// others start, and no launch needs all its groups at once.
//
// The state must be zero before the first launch; the last group to leave makes it zero again.

#ifndef PHASES_H
#define PHASES_H

#define LINE 16  // ints a cache line: counters that change together lie apart
#define STATE_LEFT 0
#define STATE_NEXT(phase) ((1 + 2 * (phase)) * LINE)
#define STATE_DONE(phase) ((2 + 2 * (phase)) * LINE)
// The counters as they look to what numbers its phases from `first` on as from 0.
#define COUNTERS(state, first) ((state) + 2 * (first) * LINE)

// The next part of a phase that is nobody's; `parts` or more when there is none.
inline int claim(global atomic_int *state, int phase) {
    return atomic_fetch_add_explicit(state + STATE_NEXT(phase), 1, memory_order_relaxed,
                                     memory_scope_device);
}

inline void finish(global atomic_int *state, int phase) {
    atomic_fetch_add_explicit(state + STATE_DONE(phase), 1, memory_order_release,
                              memory_scope_device);
}

// What all parts of the phase have written is there afterwards.
inline void await(global atomic_int *state, int phase, int parts) {
    while (atomic_load_explicit(state + STATE_DONE(phase), memory_order_acquire,
                                memory_scope_device) < parts)
        __asm__ volatile("pause");
}

inline void leave(global atomic_int *state, int phases) {
    int left = atomic_fetch_add_explicit(state + STATE_LEFT, 1, memory_order_acq_rel,
                                         memory_scope_device);
    if (left + 1 < (int)get_num_groups(0))
        return;
    for (int i = 0; i <= 2 * phases; i++)
        atomic_store_explicit(state + i * LINE, 0, memory_order_relaxed, memory_scope_device);
}
#endif
