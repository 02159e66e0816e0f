// What all matrix products share: up to three weight matrices (formats W0, W1, W2; N0, N1, N2
// rows) whose results lie side by side, and what is done with a result before it is stored.

#ifndef MUL_MAT_H
#define MUL_MAT_H
#include "blocks.h"

#define EPILOGUE_none 0
#define EPILOGUE_add 1
#define EPILOGUE_swiglu 2
#define EPILOGUE_KIND PASTE(EPILOGUE_, EPILOGUE)
#define SWIGLU (EPILOGUE_KIND == EPILOGUE_swiglu)
#define ADD (EPILOGUE_KIND == EPILOGUE_add)
#define GROUPS(n) (((n) + 15) / 16)
// Row groups whose results are stored apart.
#define TOTAL_GROUPS (SWIGLU ? GROUPS(N0) : GROUPS(N0) + GROUPS(N1) + GROUPS(N2))

#define TYPE0 PASTE(TYPE_, W0)
#define TYPE1 PASTE(TYPE_, W1)
#define TYPE2 PASTE(TYPE_, W2)

// Where a row group lies and where its results go.
typedef struct {
    global const uchar *weights;
    int matrix;  // 0, 1, 2: which weights, so which TYPE
    int row;     // first column of y
    int count;   // rows that exist: 16, or fewer in a matrix's last group
} Target;

inline Target target_of(int group, global const uchar *w0, global const uchar *w1,
                        global const uchar *w2) {
    int second = group - GROUPS(N0), third = second - GROUPS(N1);
    if (second < 0 || SWIGLU)
        return (Target){row_group(TYPE0, K, w0, group), 0, group * 16, N0 - group * 16};
    if (third < 0)
        return (Target){row_group(TYPE1, K, w1, second), 1, N0 + second * 16, N1 - second * 16};
    return (Target){row_group(TYPE2, K, w2, third), 2, N0 + N1 + third * 16, N2 - third * 16};
}

// CALL(TYPE, ...) with the constant type of a target's weights; formats that are equal share code.
#define WITH_TYPE_OF(target, CALL, ...)                                                            \
    if (TYPE1 != TYPE0 && (target).matrix == 1)                                                    \
        CALL(TYPE1, __VA_ARGS__);                                                                  \
    else if (TYPE2 != TYPE0 && (target).matrix == 2)                                               \
        CALL(TYPE2, __VA_ARGS__);                                                                  \
    else                                                                                           \
        CALL(TYPE0, __VA_ARGS__)
#endif
