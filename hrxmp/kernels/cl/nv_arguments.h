// The arguments of nv_program: as many as any program may need, by kind and number. INTS, FLOATS and
// BUFFERS below are what `nvidia_program.py` declares.

#ifndef NV_ARGUMENTS_H
#define NV_ARGUMENTS_H

#define INTS 20
#define FLOATS 10
#define BUFFERS 260

#define TEN(X, tens)                                                                               \
    X(tens##0) X(tens##1) X(tens##2) X(tens##3) X(tens##4) X(tens##5) X(tens##6) X(tens##7)        \
    X(tens##8) X(tens##9)
#define HUNDRED(X, hundreds)                                                                       \
    TEN(X, hundreds##0) TEN(X, hundreds##1) TEN(X, hundreds##2) TEN(X, hundreds##3)                \
    TEN(X, hundreds##4) TEN(X, hundreds##5) TEN(X, hundreds##6) TEN(X, hundreds##7)                \
    TEN(X, hundreds##8) TEN(X, hundreds##9)
#define ALL_INTS(X) TEN(X, 0) TEN(X, 1)
#define ALL_FLOATS(X) TEN(X, 0)
#define ALL_BUFFERS(X)                                                                             \
    HUNDRED(X, 0) HUNDRED(X, 1) TEN(X, 20) TEN(X, 21) TEN(X, 22) TEN(X, 23) TEN(X, 24) TEN(X, 25)

#define INT_ARGUMENT(n) int i##n,
#define FLOAT_ARGUMENT(n) float f##n,
#define BUFFER_ARGUMENT(n) global uchar *b##n,
#define ARGUMENTS                                                                                  \
    ALL_INTS(INT_ARGUMENT) ALL_FLOATS(FLOAT_ARGUMENT) ALL_BUFFERS(BUFFER_ARGUMENT)                 \
    volatile global uint *state

// Arguments cannot be indexed: one item puts them where all can.
#define PUT_INT(n) *next_int++ = i##n;
#define PUT_FLOAT(n) *next_float++ = f##n;
#define PUT_BUFFER(n) *next_buffer++ = (ulong)b##n;
#define PUT_ARGUMENTS(ints, floats, buffers)                                                       \
    {                                                                                              \
        local int *next_int = ints;                                                                \
        local float *next_float = floats;                                                          \
        local ulong *next_buffer = buffers;                                                        \
        ALL_INTS(PUT_INT) ALL_FLOATS(PUT_FLOAT) ALL_BUFFERS(PUT_BUFFER)                            \
    }
#endif
