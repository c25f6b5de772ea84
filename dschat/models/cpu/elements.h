// Elements of tensors, float or bfloat16, and functions of them that the CPU kernels share.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

inline float load(const float* p) { return *p; }
inline float load(const bf16* p) {
    uint32_t bits = uint32_t(p->bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float* p, float value) { *p = value; }
inline void store(bf16* p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) {
        p->bits = 0x7FC0;
    } else {
        bits += 0x7FFF + ((bits >> 16) & 1);  // to nearest, ties to even
        p->bits = uint16_t(bits >> 16);
    }
}

// e^x for x <= 0 to 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]; 0 below -87. Vectorises.
// Natural: as wide as Float, which is float or a vector of them.
template <typename Float, typename Natural>
inline Float exponential(Float x) {
    const Float shift = Float{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
    const Float lowest = Float{} - 87.0f;
    const Float shifted = x * 1.44269504f + shift, n = shifted - shift;
    const Float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Float p = Float{} + 1.98756915e-4f;
    p = p * r + 1.39819994e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666654e-1f;
    p = p * r + 5.00000012e-1f;
    p = p * (r * r) + r + 1.0f;
    Natural bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    Float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < lowest ? Float{} : p * scale;
}
inline float exp_of_negative(float x) { return exponential<float, uint32_t>(x); }

inline float sigmoid(float x) {
    const float e = exp_of_negative(-std::fabs(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}
