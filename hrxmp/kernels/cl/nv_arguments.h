// The numbers among the arguments of nv_program: as many as any program may need. INTS and FLOATS
// are what `nvidia_program.py` declares.

#ifndef NV_ARGUMENTS_H
#define NV_ARGUMENTS_H

#define INTS 40
#define FLOATS 10

#define TEN(X, tens)                                                                               \
    X(tens##0) X(tens##1) X(tens##2) X(tens##3) X(tens##4) X(tens##5) X(tens##6) X(tens##7)        \
    X(tens##8) X(tens##9)
#define ALL_INTS(X) TEN(X, 0) TEN(X, 1) TEN(X, 2) TEN(X, 3)
#define ALL_FLOATS(X) TEN(X, 0)

#define INT_ARGUMENT(n) int i##n,
#define FLOAT_ARGUMENT(n) float f##n,
#define NUMBERS ALL_INTS(INT_ARGUMENT) ALL_FLOATS(FLOAT_ARGUMENT)

// Arguments cannot be indexed: one item puts them where all can.
#define PUT_INT(n) *next_int++ = i##n;
#define PUT_FLOAT(n) *next_float++ = f##n;
#define PUT_NUMBERS(ints, floats)                                                                  \
    {                                                                                              \
        local int *next_int = ints;                                                                \
        local float *next_float = floats;                                                          \
        ALL_INTS(PUT_INT) ALL_FLOATS(PUT_FLOAT)                                                    \
    }
#endif
