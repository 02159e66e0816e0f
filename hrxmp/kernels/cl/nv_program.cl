// The commands of a graph program for one row, one after the other, in one launch: all work-groups
// take part in each, with a barrier of all groups between them.
//
// PLAN has WIDTH numbers a command: which STEP, then for each argument of that step's kernel its
// place among the launch's ints and floats or the table of addresses. S0 .. S11 are the steps: kernels
// with their sizes. Behind the table lies what attention keeps while groups share a head.

#include "nv_arguments.h"
#include "nv_attention.h"
#include "nv_blocks.h"
#include "nv_grid.h"
#include "nv_mat_vec.h"

#define WIDTH 16
#define STATE_OF_HEADS 16  // where their counters begin in `state`

typedef struct {
    local const int *ints;
    local const float *floats;
    local const ulong *buffers;
    local Attending *attending;
    Desk desk;
    global float *partials;         // of attention: PARTIAL for each chunk of each head
    volatile global uint *arrived;  // for each head, its chunks that are done
} Table;

constant int plan[] = {PLAN};

#define INT(i) table.ints[command[i]]
#define FLOAT(i) table.floats[command[i]]
#define BUFFER(type, i) ((global type *)table.buffers[command[i]])

// The arguments of nv_mul_mat_vec, of row 0.
INLINE Operands operands_of(constant int *command, Table table) {
    command++;
    return (Operands){BUFFER(const float, 8) + INT(2), BUFFER(const float, 9),
                      BUFFER(const float, 13) + INT(4), BUFFER(const uchar, 10),
                      BUFFER(const uchar, 11), BUFFER(const uchar, 12),
                      BUFFER(float, 14) + INT(6), FLOAT(7)};
}

// The arguments of nv_attend. A head's rows are shared by up to CHUNKS groups.
INLINE void attend_step(constant int *command, Table table) {
    command++;
    int position = BUFFER(const int, 10)[0];
    int chunks = clamp(min(position + 1, INT(1)) / CHUNK_ROWS, 1, CHUNKS);
    for (int unit = get_group_id(0); unit < HEADS * chunks; unit += get_num_groups(0)) {
        int head = unit / chunks;
        Split split = {unit % chunks, chunks, table.partials + head * CHUNKS * PARTIAL,
                       table.arrived + head};
        attend_head(head, position, INT(1), FLOAT(6), FLOAT(7), FLOAT(8),
                    BUFFER(const float, 9) + INT(3), BUFFER(const float, 11), BUFFER(cached, 12),
                    BUFFER(cached, 13), BUFFER(float, 14) + INT(5), split, table.attending,
                    table.desk.scratch);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

// The arguments of nv_get_rows.
INLINE void get_row_step(int format, int k, constant int *command, Table table) {
    command++;
    int chunk = get_global_id(0);
    if (chunk < k / 32)
        get_chunk(format, k, chunk, BUFFER(const int, 5)[0], INT(1), BUFFER(const uchar, 4),
                  BUFFER(float, 6) + INT(3));
}

// A step is one of these.
#define product(w0, w1, w2, k, n0, n1, n2, epilogue, norm, packed, rows, split)                    \
    {                                                                                              \
        const Shape shape = {FORMAT(w0), FORMAT(w1), FORMAT(w2), k, n0, n1, n2,                    \
                             EPILOGUE_OF(epilogue), norm, packed, rows, split};                    \
        mat_vec(shape, operands_of(command, table), table.desk);                                   \
    }
#define attention attend_step(command, table);
#define embedding(format, k) get_row_step(FORMAT(format), k, command, table);
#define idle

INLINE void do_step(constant int *command, Table table) {
    switch (command[0]) {
    case 0: S0 break;
    case 1: S1 break;
    case 2: S2 break;
    case 3: S3 break;
    case 4: S4 break;
    case 5: S5 break;
    case 6: S6 break;
    case 7: S7 break;
    case 8: S8 break;
    case 9: S9 break;
    case 10: S10 break;
    default: S11 break;
    }
}

KERNEL nv_program(NUMBERS global ulong *addresses, volatile global uint *state) {
    local uint row[ROW] __attribute__((aligned(16)));
    local float results[WARPS * MAX_SUMS], scratch[LX], floats[FLOATS];
    local Attending attending;
    local ulong buffers[BUFFERS];
    local int ints[INTS];
    if (i00 == 0)
        return;
    if (get_local_id(0) == 0)
        PUT_NUMBERS(ints, floats)
    for (int i = get_local_id(0); i < BUFFERS; i += LX)
        buffers[i] = addresses[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    Table table = {ints, floats, buffers, &attending, {row, results, scratch},
                   (global float *)(addresses + BUFFERS), state + STATE_OF_HEADS};
    for (int at = 0; at < COMMANDS; at++) {
        do_step(plan + at * WIDTH, table);
        if (at + 1 < COMMANDS)
            meet(state, (at + 1) * get_num_groups(0));
    }
    leave(state, COMMANDS - 1);
}
