// Rotary positions. Elements 2i, 2i + 1 of a head (norm) or i, i + N_DIMS / 2 (neox) turn together
// by position * freq_scale * freq_base^(-2i / N_DIMS) / factors[i].

#ifndef ROPE_H
#define ROPE_H

#define PAIRS (N_DIMS / 2)
#define FIRST_OF(i) (NEOX ? (i) : 2 * (i))
#define SECOND_OF(i) (NEOX ? (i) + PAIRS : 2 * (i) + 1)

inline float angle_of(int i, int position, float freq_base, float freq_scale,
                      global const float *factors) {
    float angle = (float)position * freq_scale * pow(freq_base, -2.0f * i / N_DIMS);
#if FACTORS
    angle /= factors[i];
#endif
    return angle;
}

// cosines and sines of one position, all pairs, by one work-item.
inline void rope_table(int position, float freq_base, float freq_scale,
                       global const float *factors, local float *cosines, local float *sines) {
    int i = 0;
    for (; i + 16 <= PAIRS; i += 16) {
        float16 index = (float)i + (float16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        float16 angle =
            (float)position * freq_scale * pow((float16)freq_base, index * (-2.0f / N_DIMS));
#if FACTORS
        angle /= vload16(0, factors + i);
#endif
        vstore16(cos(angle), 0, cosines + i);
        vstore16(sin(angle), 0, sines + i);
    }
    for (; i < PAIRS; i++) {
        float angle = angle_of(i, position, freq_base, freq_scale, factors);
        cosines[i] = cos(angle);
        sines[i] = sin(angle);
    }
}
#endif
