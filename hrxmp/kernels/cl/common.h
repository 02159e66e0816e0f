// What every kernel file shares: the entry point's form, and elements of any plain type as floats.
// LX, LY, LZ are the variant's local size; ENTRY_name is defined for the kernel that is built, so
// that a file of several kernels costs the compiler one.

#define KERNEL kernel __attribute__((reqd_work_group_size(LX, LY, LZ))) void

// The column of an item: axis 0, continued along axis 2 where a row is long (see grid.py).
#define COLUMN ((int)(get_global_id(0) + get_global_id(2) * get_global_size(0)))

// Element types are given by name in a define, e.g. -DSRC=f16; TYPE(SRC) is what a pointer needs.
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TYPE(name) JOIN(type_, name)
#define LOAD(name, p, i) JOIN(load_, name)(p, i)
#define STORE(name, p, i, v) JOIN(store_, name)(p, i, v)

// Defines, not typedefs: without fp16 a compiler may know `half` only behind a pointer.
#define type_f32 float
#define type_f16 half
#define type_i32 int

inline float load_f32(global const float *p, int i) { return p[i]; }
inline float load_f16(global const half *p, int i) { return vload_half(i, p); }
inline int load_i32(global const int *p, int i) { return p[i]; }

inline void store_f32(global float *p, int i, float v) { p[i] = v; }
inline void store_f16(global half *p, int i, float v) { vstore_half(v, i, p); }
inline void store_i32(global int *p, int i, int v) { p[i] = v; }
