// What all matrix products share: up to three weight matrices of one format whose results lie side
// by side (N0, N1, N2 rows), and what is done with a result before it is stored.

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

// Where a row group lies and where its results go.
typedef struct {
    global const uchar *weights;
    int row;    // first column of y
    int count;  // rows that exist: 16, or fewer in a matrix's last group
} Target;

inline Target target_of(int group, global const uchar *w0, global const uchar *w1,
                        global const uchar *w2) {
    int second = group - GROUPS(N0), third = second - GROUPS(N1);
    Target target;
    if (second < 0 || SWIGLU) {
        target.weights = row_group(w0, group);
        target.row = group * 16;
        target.count = N0 - group * 16;
    } else if (third < 0) {
        target.weights = row_group(w1, second);
        target.row = N0 + second * 16;
        target.count = N1 - second * 16;
    } else {
        target.weights = row_group(w2, third);
        target.row = N0 + N1 + third * 16;
        target.count = N2 - third * 16;
    }
    return target;
}
#endif
