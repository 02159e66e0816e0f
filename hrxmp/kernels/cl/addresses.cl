// Writes where buffers lie on the device into a table, from entry `first` on: a launch with a table
// of addresses costs less than one with as many arguments.

#define TEN(X, tens)                                                                               \
    X(tens##0) X(tens##1) X(tens##2) X(tens##3) X(tens##4) X(tens##5) X(tens##6) X(tens##7)        \
    X(tens##8) X(tens##9)
#define ALL(X) TEN(X, 0) TEN(X, 1) TEN(X, 2) TEN(X, 3) TEN(X, 4) TEN(X, 5)
#define ARGUMENT(n) global uchar *b##n,
#define PUT(n)                                                                                     \
    if (at < count)                                                                                \
        table[first + at] = (ulong)b##n;                                                           \
    at++;

__attribute__((reqd_work_group_size(LX, LY, LZ)))
kernel void addresses(int count, int first, ALL(ARGUMENT) global ulong *table) {
    int at = 0;
    if (get_global_id(0) == 0) {
        ALL(PUT)
    }
}
