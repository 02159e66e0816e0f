// What instrumented kernels call (see instrument.py). A pointer belongs to the binding that it points
// into; each access through it must lie inside that binding. One that does not is counted, with the
// element index of the first, and goes to memory that nobody reads instead.

#define SAN_OVERLOAD __attribute__((overloadable))
#define SAN_ACCESS 0
#define SAN_VALUE 1
#define SAN_ZONE 65536  // bytes that bad accesses may touch
#define SAN_INTS 4      // a finding: count, then the first index as two halves, unused

// The bindings of a launch: address ranges, and where findings go.
typedef struct {
    ulong base[SAN_BINDINGS], end[SAN_BINDINGS];
    global int *findings;
    global char *zone;
} San;

inline int san_binding(private const San *san, ulong address) {
    int found = 0;
    ulong nearest = 0;
    for (int b = 0; b < SAN_BINDINGS; b++)
        if (san->base[b] <= address && (san->base[b] > nearest || (san->base[b] == nearest &&
                                                                   san->end[b] > san->end[found]))) {
            nearest = san->base[b];
            found = b;
        }
    return found;
}

inline void san_found(private const San *san, int binding, int check, ulong address, uint unit) {
    global int *finding = san->findings + (binding * 2 + check) * SAN_INTS;
    if (atomic_inc(finding) == 0) {
        long index = (long)(address - san->base[binding]) / (long)unit;
        finding[1] = (int)index;
        finding[2] = (int)(index >> 32);
    }
}

// A function of its own, or a kernel of many accesses takes the compiler half a minute.
__attribute__((noinline)) global void *san_checked(private const San *san, ulong from, ulong address,
                                                   uint bytes, uint unit) {
    int binding = san_binding(san, from);
    if (address >= san->base[binding] && address + bytes <= san->end[binding])
        return (global void *)address;
    san_found(san, binding, SAN_ACCESS, address, unit);
    return (global void *)san->zone;
}

// Where `bytes` bytes at `offset` from p may be read or written. `unit` is the element's size.
inline global void *SAN_OVERLOAD san_at(private const San *san, global const void *p, long offset,
                                        uint bytes, uint unit) {
#if SANITIZE_ACCESS
    return san_checked(san, (ulong)p, (ulong)p + offset, bytes, unit);
#else
    return (global void *)((global char *)p + offset);
#endif
}
inline local void *SAN_OVERLOAD san_at(private const San *san, local const void *p, long offset,
                                       uint bytes, uint unit) {
    return (local char *)p + offset;
}
inline private void *SAN_OVERLOAD san_at(private const San *san, private const void *p, long offset,
                                         uint bytes, uint unit) {
    return (private char *)p + offset;
}
inline constant void *SAN_OVERLOAD san_at(private const San *san, constant const void *p,
                                          long offset, uint bytes, uint unit) {
    return (constant char *)p + offset;
}

// What was stored at p[index]: not a number, or infinite?
inline void SAN_OVERLOAD san_stored(private const San *san, global const void *p, long index,
                                    uint unit, float value) {
#if SANITIZE_VALUE
    if (isnan(value) || isinf(value)) {
        ulong address = (ulong)p + index * (long)unit;
        san_found(san, san_binding(san, (ulong)p), SAN_VALUE, address, unit);
    }
#endif
}
inline void SAN_OVERLOAD san_stored(private const San *san, local const void *p, long index,
                                    uint unit, float value) {}
inline void SAN_OVERLOAD san_stored(private const San *san, private const void *p, long index,
                                    uint unit, float value) {}

inline float SAN_OVERLOAD san_worst(float v) { return v; }
inline float SAN_OVERLOAD san_worst(float2 v) { return v.x * 0.0f + v.y * 0.0f; }
inline float SAN_OVERLOAD san_worst(float3 v) { return san_worst(v.xy) + v.z * 0.0f; }
inline float SAN_OVERLOAD san_worst(float4 v) { return san_worst(v.lo) + san_worst(v.hi); }
inline float SAN_OVERLOAD san_worst(float8 v) { return san_worst(v.lo) + san_worst(v.hi); }
inline float SAN_OVERLOAD san_worst(float16 v) { return san_worst(v.lo) + san_worst(v.hi); }
#define SAN_WORST(T) inline float SAN_OVERLOAD san_worst(T v) { return 0.0f; }
#define SAN_WORSTS(T) SAN_WORST(T) SAN_WORST(T##2) SAN_WORST(T##4) SAN_WORST(T##8) SAN_WORST(T##16)
SAN_WORSTS(char) SAN_WORSTS(uchar) SAN_WORSTS(short) SAN_WORSTS(ushort)
SAN_WORSTS(int) SAN_WORSTS(uint) SAN_WORSTS(long) SAN_WORSTS(ulong)
inline float SAN_OVERLOAD san_worst(double v) { return (float)v; }

#define SAN_TYPE(p) __typeof__(&(p)[0])
#define SAN_AT(p, i) \
    (*(SAN_TYPE(p))san_at(san, (p), (long)(i) * (long)sizeof((p)[0]), sizeof((p)[0]), sizeof((p)[0])))
// n elements from element i on, as vloadn and vstoren address them.
#define SAN_SPAN(p, i, n) \
    ((SAN_TYPE(p))san_at(san, (p), (long)(i) * (n) * (long)sizeof((p)[0]), (n) * sizeof((p)[0]), \
                         sizeof((p)[0])))
// The same for halves, which cannot be subscripted on every device.
#define SAN_HALVES(p, i, n, step) \
    ((__typeof__(p))san_at(san, (p), (long)(i) * (step) * 2, (n) * 2, 2))

#define SAN_LOAD(f, n, i, p) f(0, SAN_SPAN(p, i, n))
#define SAN_STORE(f, n, v, i, p) \
    (f(v, 0, SAN_SPAN(p, i, n)), san_stored(san, (p), (long)(i) * (n), sizeof((p)[0]), san_worst(v)))
#define SAN_LOAD_HALF(f, n, step, i, p) f(0, SAN_HALVES(p, i, n, step))
#define SAN_STORE_HALF(f, n, step, v, i, p) \
    (f(v, 0, SAN_HALVES(p, i, n, step)), san_stored(san, (p), (long)(i) * (step), 2, san_worst(v)))
#define SAN_SET(p, i, assigned) \
    san_stored(san, (p), (long)(i), sizeof((p)[0]), san_worst(assigned))
