// Products of small matrices for attention: tiles of vector registers, and matrices packed as their operands.
//
// Operands are words of 4 bytes: floats, or two bfloat16 of which the processor adds the products of a pair at once.
#pragma once
#include <algorithm>
#include <new>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "elements.h"

namespace {

// Vectors as wide as the processor's. A tile of ROWS x VECTORS of them, a row of operands and one scalar fill its
// registers.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, ROWS = 4;
#else
constexpr int64_t LANES = 4, ROWS = 4;
#endif
constexpr int64_t VECTORS = 3;
typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t naturals __attribute__((vector_size(LANES * 4)));

constexpr int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
template <typename Vector>
inline Vector load_vector(const void* p) {
    Vector value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// Buffers begin at a cache line: loads of vectors that cross lines take twice as long.
constexpr std::align_val_t LINE{64};
template <typename T>
struct Aligned {
    using value_type = T;
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
    void deallocate(T* p, size_t) { ::operator delete(p, LINE); }
    bool operator==(const Aligned&) const { return true; }
    bool operator!=(const Aligned&) const { return false; }
};
typedef std::vector<float, Aligned<float>> Buffer;

inline lanes load_lanes(const float* p) { return load_vector<lanes>(p); }
inline void store_lanes(float* p, lanes value) { std::memcpy(p, &value, sizeof value); }
inline lanes exp_of_negative(lanes x) { return exponential<lanes, naturals>(x); }
inline lanes larger(lanes a, lanes b) { return a > b ? a : b; }

// A float or a word of two bfloat16 in every lane.
inline lanes broadcast(float word) {
#if defined(__AVX512BF16__)
    return lanes(_mm512_set1_ps(word));  // arithmetic could change a word
#else
    return word - lanes{};
#endif
}

inline integers counting() {
    integers value;
    for (int32_t i = 0; i < LANES; ++i) value[i] = i;
    return value;
}

// Elements in a word: neighbours along the depth of a product.
#if defined(__AVX512BF16__)
template <typename T>
constexpr int64_t DEPTH = sizeof(T) == 2 ? 2 : 1;
#else
template <typename T>
constexpr int64_t DEPTH = 1;
#endif

template <typename T>
inline lanes multiply_add(lanes sum, lanes factor, lanes operand) {
#if defined(__AVX512BF16__)
    if constexpr (DEPTH<T> == 2)
        return lanes(_mm512_dpbf16_ps(__m512(sum), __m512bh(factor), __m512bh(operand)));
#endif
    return sum + factor * operand;
}

// One tile: c[ROWS, V] (+)= a[ROWS, depth] b[depth, V], V in vectors, depth in words.
template <typename T, int V>
inline void tile(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                 int64_t b_row, int64_t depth, bool adds) {
    lanes sum[ROWS][V];
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) sum[r][v] = adds ? load_lanes(c + r * c_row + v * LANES) : lanes{};
    for (int64_t k = 0; k < depth; ++k, a += a_column, b += b_row) {
        lanes operand[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) operand[v] = load_lanes(b + v * LANES);
#pragma GCC unroll 8
        for (int64_t r = 0; r < ROWS; ++r) {
            const lanes factor = broadcast(a[r * a_row]);
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) sum[r][v] = multiply_add<T>(sum[r][v], factor, operand[v]);
        }
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) store_lanes(c + r * c_row + v * LANES, sum[r][v]);
}

// c[ROWS, columns] (+)= a[ROWS, depth] b[depth, columns]. Columns are rounded up to LANES: what b holds there must be
// readable, and lands in the same places of c.
template <typename T>
void multiply(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
              int64_t columns, int64_t depth, bool adds) {
    int64_t left = round_up(columns, LANES) / LANES;  // vectors
    for (int64_t panels = (left + VECTORS - 1) / VECTORS; panels > 0; --panels) {
        const int64_t vectors = (left + panels - 1) / panels;  // four as two and two rather than three and one
        switch (vectors) {
            case 3: tile<T, 3>(c, c_row, a, a_row, a_column, b, b_row, depth, adds); break;
            case 2: tile<T, 2>(c, c_row, a, a_row, a_column, b, b_row, depth, adds); break;
            default: tile<T, 1>(c, c_row, a, a_row, a_column, b, b_row, depth, adds);
        }
        c += vectors * LANES;
        b += vectors * LANES;
        left -= vectors;
    }
}

// One step of a transposition: exchanges the off-diagonal parts of every 2 x 2 parts of STEP x STEP words.
template <int64_t STEP>
inline void exchange(lanes (&rows)[LANES]) {
    const integers index = counting(), upper = (index & int32_t(STEP)) != 0;
    const integers first = upper ? index + int32_t(LANES - STEP) : index;
    const integers second = upper ? index + int32_t(LANES) : index + int32_t(STEP);
#pragma GCC unroll 16
    for (int64_t r = 0; r < LANES; ++r) {
        if (r & STEP) continue;
        const lanes a = rows[r], b = rows[r + STEP];
        rows[r] = __builtin_shuffle(a, b, first);
        rows[r + STEP] = __builtin_shuffle(a, b, second);
    }
}

// to[columns, rows] = from[rows, columns] in words, both rounded up to LANES.
void transpose(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += LANES)
        for (int64_t c = 0; c < columns; c += LANES) {
            lanes part[LANES];
            for (int64_t i = 0; i < LANES; ++i) part[i] = load_lanes(from + (r + i) * from_row + c);
            exchange<1>(part);
            exchange<2>(part);
            if constexpr (LANES > 4) exchange<4>(part);
            if constexpr (LANES > 8) exchange<8>(part);
            for (int64_t i = 0; i < LANES; ++i) store_lanes(to + (c + i) * to_row + r, part[i]);
        }
}

#if defined(__AVX512BF16__)
// The lanes of `even` and then those of `odd`, in bfloat16.
inline __m512i narrow(lanes even, lanes odd) { return __m512i(_mm512_cvtne2ps_pbh(__m512(odd), __m512(even))); }
#endif

// Parts of two neighbouring rows of a matrix as words along its rows, of which `words` lie between them.
template <typename T>
inline void store_along(float* to, int64_t words, lanes even, lanes odd) {
#if defined(__AVX512BF16__)
    if constexpr (DEPTH<T> == 2) {
        const __m512i both = narrow(even, odd);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(both));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + words), _mm512_extracti64x4_epi64(both, 1));
        return;
    }
#endif
    store_lanes(to, even);
    store_lanes(to + words, odd);
}

// The same as words down its columns.
template <typename T>
inline void store_down(float* to, int64_t width, lanes even, lanes odd) {
#if defined(__AVX512BF16__)
    if constexpr (DEPTH<T> == 2) {
        const integers index = counting();
        const __m512i order = __m512i(index | (index + 16) << 16);
        store_lanes(to, lanes(_mm512_permutexvar_epi16(order, narrow(even, odd))));
        return;
    }
#endif
    store_lanes(to, even);
    store_lanes(to + width, odd);
}

// A row of a tensor from float32.
template <typename T>
inline void store_row(T* to, const float* from, int64_t count, float factor) {
    int64_t d = 0;
#if defined(__AVX512BF16__)
    if constexpr (DEPTH<T> == 2)
        for (; d + LANES <= count; d += LANES) {
            const __m256i part = __m256i(_mm512_cvtneps_pbh(__m512(load_lanes(from + d) * factor)));
            std::memcpy(to + d, &part, sizeof part);
        }
#endif
    for (; d < count; ++d) store(to + d, from[d] * factor);
}

// A matrix as an operand of products in which the depth runs along its rows, down its columns, or both.
template <typename T>
class Operand {
  public:
    explicit Operand(int64_t columns)
        : columns(columns), width(round_up(columns, LANES)), words(round_up(columns, DEPTH<T> * LANES) / DEPTH<T>) {}

    void resize(int64_t rows) {
        row_words.resize(rows * words);
        if (DEPTH<T> == 2) column_words.resize(rows / 2 * width);
    }
    float* along(int64_t row) { return row_words.data() + row * words; }
    float* down(int64_t row) { return DEPTH<T> == 2 ? column_words.data() + row / 2 * width : along(row); }

    // Rows of a tensor, and zeros up to a multiple of LANES rows.
    void copy(int64_t row, const T* from, int64_t stride, int64_t rows) {
        const int64_t padded = DEPTH<T> * words;
        for (int64_t r = 0; r < rows; ++r, from += stride) {
            float* to = along(row + r);
            if constexpr (DEPTH<T> == 2) {
                int64_t d = 0;
                for (; d + DEPTH<T> * LANES <= columns; d += DEPTH<T> * LANES)
                    store_lanes(to + d / DEPTH<T>, load_vector<lanes>(from + d));
                if (d == padded) continue;
                std::memset(to + d / DEPTH<T>, 0, (padded - d) * 2);
                std::memcpy(to + d / DEPTH<T>, from + d, (columns - d) * 2);
            } else {
                for (int64_t d = 0; d < columns; ++d) to[d] = load(from + d);
                std::fill(to + columns, to + padded, 0.0f);
            }
        }
        std::fill(along(row + rows), along(row) + round_up(rows, LANES) * words, 0.0f);
    }

    // Words down the columns of rows that are there along the rows.
    void pair(int64_t row, int64_t rows) {
        if (DEPTH<T> == 1) return;
        for (int64_t r = row; r < row + rows; r += 2) {
            const char *even = reinterpret_cast<char*>(along(r)), *odd = reinterpret_cast<char*>(along(r + 1));
            char* to = reinterpret_cast<char*>(down(r));
            for (int64_t d = 0; d < width; ++d) {
                uint16_t low, high;
                std::memcpy(&low, even + d * 2, 2);
                std::memcpy(&high, odd + d * 2, 2);
                const uint32_t word = low | uint32_t(high) << 16;
                std::memcpy(to + d * 4, &word, 4);
            }
        }
    }

    const int64_t columns, width;  // width: columns rounded up to LANES
    const int64_t words;           // along a row

  private:
    Buffer row_words, column_words;
};

}  // namespace
