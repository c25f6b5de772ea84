// CPU kernels for decoding steps, where torch is slow: attention of one query token per row over the KV pool, sampling
// a token per row of logits, and bf16 linear layers.
// Plain C interface, so that it compiles in seconds and does not depend on torch's version. Matrices are row-major;
// "stride" counts elements.
#include <algorithm>
#include <limits>
#include <vector>

#include "elements.h"
#include "team.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct Attention {
    void* out;           // [rows, heads, value_width]
    const void* query;   // [rows, heads, width]
    const void* new_key;     // [rows, kv_heads, width]
    const void* new_value;   // [rows, kv_heads, value_width]
    void* keys;          // [tokens, kv_heads, width]
    void* values;        // [tokens, kv_heads, value_width]
    const int64_t* spans;  // [rows, 4]: prompt start, prompt length, response start, response length
    int64_t rows, heads, kv_heads, width, value_width;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;  // strides
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
};

// Vectors of 4 and 16 elements, compiled to whatever SIMD the processor has.
typedef float lanes4 __attribute__((vector_size(16)));
typedef float lanes8 __attribute__((vector_size(32)));
typedef float lanes16 __attribute__((vector_size(64)));
typedef uint16_t halves16 __attribute__((vector_size(32)));
typedef uint32_t words16 __attribute__((vector_size(64)));

inline lanes16 load16(const float* p) {
    lanes16 value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
inline lanes16 load16(const bf16* p) {
    halves16 bits;
    std::memcpy(&bits, p, sizeof bits);
    const words16 wide = __builtin_convertvector(bits, words16) << 16;
    lanes16 value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}
inline lanes4 fold(lanes16 x) {
    lanes8 half[2];
    std::memcpy(half, &x, sizeof x);
    const lanes8 sum = half[0] + half[1];
    lanes4 quarter[2];
    std::memcpy(quarter, &sum, sizeof sum);
    return quarter[0] + quarter[1];
}

// out[j] = sum of query[d] * key[j * step + d], for j < 4. The four sums are reduced together, which compilers do not
// do for four separate reductions.
template <typename T>
inline void four_dots(float* out, const float* query, const T* key, int64_t step, int64_t width) {
    lanes16 sum[4] = {};
    int64_t d = 0;
    for (; d + 16 <= width; d += 16) {
        const lanes16 q = load16(query + d);
        for (int j = 0; j < 4; ++j) sum[j] += q * load16(key + j * step + d);
    }
    const lanes4 a = fold(sum[0]), b = fold(sum[1]), c = fold(sum[2]), e = fold(sum[3]);
    const lanes4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const lanes4 ce = __builtin_shufflevector(c, e, 0, 4, 1, 5) + __builtin_shufflevector(c, e, 2, 6, 3, 7);
    lanes4 all = __builtin_shufflevector(ab, ce, 0, 1, 4, 5) + __builtin_shufflevector(ab, ce, 2, 3, 6, 7);
    for (; d < width; ++d)
        for (int j = 0; j < 4; ++j) all[j] += query[d] * load(key + j * step + d);
    std::memcpy(out, &all, sizeof all);
}

// Prefetch memory that is needed soon; the address may be out of bounds.
template <typename T>
inline void prefetch(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i);
}

// One row's attention for adjacent key-value heads, which are contiguous per token and read in one stream.
// WIDTH is the head width if fixed at compile time, else 0.
template <typename T, int WIDTH>
void attend_row(const Attention& a, int64_t row, int64_t first_head, int64_t kv_heads, std::vector<float>& buffer) {
    const int64_t width = WIDTH ? WIDTH : a.width, value_width = WIDTH ? WIDTH : a.value_width;
    const int64_t group = a.heads / a.kv_heads, heads = kv_heads * group;
    const int64_t* span = a.spans + 4 * row;
    const int64_t context = span[1] + span[3];
    const int64_t first = a.window && context > a.window ? context - a.window : 0;
    const int64_t length = context - first;
    const int64_t key_step = a.kv_heads * width, value_step = a.kv_heads * value_width;
    const T* keys = static_cast<const T*>(a.keys) + first_head * width;
    const T* values = static_cast<const T*>(a.values) + first_head * value_width;
    const int64_t padded = (length + 15) / 16 * 16;
    buffer.resize(heads * (padded + width + value_width));
    float* scores = buffer.data();             // [heads, padded]
    float* queries = scores + heads * padded;  // [heads, width]
    float* sums = queries + heads * width;     // [heads, value_width]
    for (int64_t h = 0; h < heads; ++h) {
        const T* query =
            static_cast<const T*>(a.query) + row * a.query_row + (first_head * group + h) * a.query_head;
        for (int64_t d = 0; d < width; ++d) queries[h * width + d] = load(query + d) * a.scale;
    }
    // The context is two runs of the pool: the prompt, which rows may share, and the row's own response.
    const int64_t prompt_from = std::min(first, span[1]), response_from = first - prompt_from;
    const int64_t starts[2] = {span[0] + prompt_from, span[2] + response_from};
    const int64_t counts[2] = {span[1] - prompt_from, span[3] - response_from};
    int64_t at = 0;
    for (int run = 0; run < 2; ++run) {
        const T* key = keys + starts[run] * key_step;
        int64_t i = 0;
        for (; i + 4 <= counts[run]; i += 4, at += 4, key += 4 * key_step) {
            prefetch(key + 8 * key_step, 4 * key_step);
            const float* query = queries;
            float* score = scores + at;
            for (int64_t h = 0; h < kv_heads; ++h) {
                const T* k = key + h * width;
                for (int64_t g = 0; g < group; ++g, query += width, score += padded) {
                    four_dots(score, query, k, key_step, width);
                }
            }
        }
        for (; i < counts[run]; ++i, ++at, key += key_step) {
            const float* query = queries;
            float* score = scores + at;
            for (int64_t h = 0; h < kv_heads; ++h) {
                for (int64_t g = 0; g < group; ++g, query += width, score += padded) {
                    float dot = 0;
#pragma omp simd reduction(+ : dot)
                    for (int64_t d = 0; d < width; ++d) dot += query[d] * load(key + h * width + d);
                    *score = dot;
                }
            }
        }
    }
    for (int64_t h = 0; h < heads; ++h) {
        float* score = scores + h * padded;
        if (a.softcap > 0)
            for (int64_t i = 0; i < length; ++i) score[i] = a.softcap * std::tanh(score[i] / a.softcap);
        float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < length; ++i) largest = std::max(largest, score[i]);
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < length; ++i) total += score[i] = exp_of_negative(score[i] - largest);
        const float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t i = 0; i < length; ++i) score[i] *= inverse;
    }
    std::fill(sums, sums + heads * value_width, 0.0f);
    at = 0;
    for (int run = 0; run < 2; ++run) {
        const T* value = values + starts[run] * value_step;
        int64_t i = 0;
        for (; i + 4 <= counts[run]; i += 4, at += 4, value += 4 * value_step) {
            prefetch(value + 8 * value_step, 4 * value_step);
            const float* weight = scores + at;
            float* sum = sums;
            for (int64_t h = 0; h < kv_heads; ++h) {
                const T* v = value + h * value_width;
                for (int64_t g = 0; g < group; ++g, weight += padded, sum += value_width) {
                    const float w0 = weight[0], w1 = weight[1], w2 = weight[2], w3 = weight[3];
#pragma omp simd
                    for (int64_t d = 0; d < value_width; ++d)
                        sum[d] += w0 * load(v + d) + w1 * load(v + value_step + d) +
                                  w2 * load(v + 2 * value_step + d) + w3 * load(v + 3 * value_step + d);
                }
            }
        }
        for (; i < counts[run]; ++i, ++at, value += value_step) {
            const float* weight = scores + at;
            float* sum = sums;
            for (int64_t h = 0; h < kv_heads; ++h) {
                const T* v = value + h * value_width;
                for (int64_t g = 0; g < group; ++g, weight += padded, sum += value_width) {
                    const float w = *weight;
#pragma omp simd
                    for (int64_t d = 0; d < value_width; ++d) sum[d] += w * load(v + d);
                }
            }
        }
    }
    T* out = static_cast<T*>(a.out) + (row * a.heads + first_head * group) * value_width;
    for (int64_t i = 0; i < heads * value_width; ++i) store(out + i, sums[i]);
}

// Write the newest token of a row to the pool.
template <typename T>
void write_row(const Attention& a, int64_t row) {
    const int64_t* span = a.spans + 4 * row;
    const int64_t newest = span[2] + span[3] - 1;
    T* keys = static_cast<T*>(a.keys) + newest * a.kv_heads * a.width;
    T* values = static_cast<T*>(a.values) + newest * a.kv_heads * a.value_width;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
        const T* key = static_cast<const T*>(a.new_key) + row * a.key_row + h * a.key_head;
        const T* value = static_cast<const T*>(a.new_value) + row * a.value_row + h * a.value_head;
        std::memcpy(keys + h * a.width, key, a.width * sizeof(T));
        std::memcpy(values + h * a.value_width, value, a.value_width * sizeof(T));
    }
}

template <typename T, int WIDTH>
void attend(const Attention& a, int threads) {
    // With few rows, threads split the heads as well.
    const int64_t parts = threads > 1 && a.rows < 4 * threads ? a.kv_heads : 1, heads = a.kv_heads / parts;
    std::atomic<int64_t> next{0};  // contexts differ in length
    // Write all tokens before attending: rows of a packed prompt attend to each other.
    const auto write = [&](int thread, int all) {
        const Share rows(a.rows, thread, all);
        for (int64_t row = rows.begin; row < rows.end; ++row) write_row<T>(a, row);
    };
    const auto attend_rows = [&](int, int) {
        std::vector<float> buffer;
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < a.rows * parts;)
            attend_row<T, WIDTH>(a, task / parts, task % parts * heads, heads, buffer);
    };
    in_parallel(threads, write, attend_rows);
}

template <typename T>
void attend(const Attention& a, int threads) {
    if (a.width != a.value_width) return attend<T, 0>(a, threads);
    switch (a.width) {
        case 32: return attend<T, 32>(a, threads);
        case 64: return attend<T, 64>(a, threads);
        case 80: return attend<T, 80>(a, threads);
        case 96: return attend<T, 96>(a, threads);
        case 128: return attend<T, 128>(a, threads);
        default: return attend<T, 0>(a, threads);
    }
}

#ifdef __AVX512BF16__
constexpr int64_t PANEL = 64;  // contiguous columns of a packed weight: four registers
constexpr int TILE = 6;        // rows computed at once: with PANEL columns, 24 of the 32 registers

// A packed weight is [panels][in / 2][PANEL][2]: the operands of one dot-product instruction are contiguous.
void pack_panels(uint16_t* packed, const uint16_t* weight, int64_t out_features, int64_t in_features, int threads) {
    const int64_t pairs = (in_features + 1) / 2, panels = (out_features + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < panels; ++panel) {
        uint16_t* to = packed + panel * pairs * PANEL * 2;
        for (int64_t pair = 0; pair < pairs; ++pair)
            for (int64_t column = 0; column < PANEL; ++column)
                for (int64_t half = 0; half < 2; ++half, ++to) {
                    const int64_t n = panel * PANEL + column, k = 2 * pair + half;
                    *to = n < out_features && k < in_features ? weight[n * in_features + k] : 0;
                }
    }
}

// ROWS rows of x times one panel, accumulated in float32.
template <int ROWS>
inline void tile(uint16_t* out, const uint16_t* x, const uint16_t* panel, const uint16_t* bias, int64_t in_features,
                 int64_t x_row, int64_t out_row, int64_t columns) {
    __m512 sum[ROWS][4];
    for (int c = 0; c < 4; ++c) {
        __m512 start = _mm512_setzero_ps();
        if (bias) {
            const __mmask16 column_mask = _cvtu32_mask16((1u << std::clamp<int64_t>(columns - 16 * c, 0, 16)) - 1);
            const __m256i bits = _mm256_maskz_loadu_epi16(column_mask, bias + 16 * c);
            start = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        }
        for (int r = 0; r < ROWS; ++r) sum[r][c] = start;
    }
    const int64_t pairs = in_features / 2;
    const auto step = [&](int64_t pair, auto value_of) {
        __m512bh w[4];
        for (int c = 0; c < 4; ++c) w[c] = (__m512bh)_mm512_loadu_si512(panel + (pair * 4 + c) * 32);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh value = (__m512bh)_mm512_set1_epi32(value_of(r));
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], w[c], value);
        }
    };
    for (int64_t pair = 0; pair < pairs; ++pair)
        step(pair, [&](int r) {
            int32_t two;
            std::memcpy(&two, x + r * x_row + 2 * pair, 4);
            return two;
        });
    if (in_features % 2) step(pairs, [&](int r) { return int32_t(x[r * x_row + in_features - 1]); });
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 4; ++c) {
            const __mmask16 column_mask = _cvtu32_mask16((1u << std::clamp<int64_t>(columns - 16 * c, 0, 16)) - 1);
            _mm256_mask_storeu_epi16(out + r * out_row + 16 * c, column_mask, (__m256i)_mm512_cvtneps_pbh(sum[r][c]));
        }
}

void multiply(uint16_t* out, const uint16_t* x, const uint16_t* packed, const uint16_t* bias, int64_t rows,
              int64_t in_features, int64_t out_features, int64_t x_row, int threads) {
    const int64_t pairs = (in_features + 1) / 2, panels = (out_features + PANEL - 1) / PANEL;
    const int64_t chunk = 16 * TILE, chunks = (rows + chunk - 1) / chunk;  // rows that fit in the cache
    in_parallel(threads, [&](int thread, int all) {
        const Share tasks(chunks * panels, thread, all);
        for (int64_t task = tasks.begin; task < tasks.end; ++task) {
            const int64_t part = task / panels, panel = task % panels;
            const uint16_t* w = packed + panel * pairs * PANEL * 2;
            const uint16_t* b = bias ? bias + panel * PANEL : nullptr;
            const int64_t columns = std::min(PANEL, out_features - panel * PANEL);
            const int64_t stop = std::min(rows, (part + 1) * chunk);
            for (int64_t row = part * chunk; row < stop;) {
                uint16_t* to = out + row * out_features + panel * PANEL;
                const uint16_t* from = x + row * x_row;
                const int64_t left = stop - row;
                // Balance the last tiles: seven rows run as four and three rather than six and one.
                const int size = left >= TILE && left != TILE + 1 ? TILE : int(std::min<int64_t>(left, 4));
                switch (size) {
                    case 6: tile<6>(to, from, w, b, in_features, x_row, out_features, columns); break;
                    case 4: tile<4>(to, from, w, b, in_features, x_row, out_features, columns); break;
                    case 3: tile<3>(to, from, w, b, in_features, x_row, out_features, columns); break;
                    case 2: tile<2>(to, from, w, b, in_features, x_row, out_features, columns); break;
                    default: tile<1>(to, from, w, b, in_features, x_row, out_features, columns);
                }
                row += size;
            }
        }
    });
}
#endif

struct Draw {
    int64_t* tokens;         // [rows]
    float* logprobs;         // [rows]
    const void* logits;      // [rows, vocabulary]
    const float* uniforms;   // [rows]; null where greedy
    int64_t rows, vocabulary, logits_row;  // the last is a stride
    int64_t top_k;           // 0: all
    double top_p;            // 1: all
    float temperature;       // 0: greedy
};

constexpr int64_t BLOCK = 1024;  // logits whose probabilities are summed in float32 before double takes over

// The smallest scaled logit kept under top-k and top-p; ties with it are kept too.
float cutoff(const std::vector<float>& scaled, const Draw& draw, std::vector<float>& order) {
    order.assign(scaled.begin(), scaled.end());
    float least = -std::numeric_limits<float>::infinity();
    auto end = order.end();
    if (draw.top_k > 0 && draw.top_k < draw.vocabulary) {
        auto kth = order.begin() + draw.top_k - 1;
        std::nth_element(order.begin(), kth, end, std::greater<float>());
        least = *kth;
        end = std::partition(order.begin(), end, [least](float x) { return x >= least; });
    }
    if (draw.top_p < 1) {
        // Sort candidates in growing runs: the whole vocabulary is rarely needed.
        const float largest = *std::max_element(order.begin(), end);
        double total = 0, mass = 0;
        for (auto x = order.begin(); x != end; ++x) total += std::exp(double(*x) - largest);
        auto sorted = order.begin();
        for (int64_t run = BLOCK; sorted != end; run *= 4) {
            auto stop = sorted + std::min<int64_t>(run, end - sorted);
            std::partial_sort(sorted, stop, end, std::greater<float>());
            for (; sorted != stop; ++sorted) {
                mass += std::exp(double(*sorted) - largest);
                least = *sorted;
                if (mass >= draw.top_p * total) return least;
            }
        }
    }
    return least;
}

template <typename T>
void draw_row(const Draw& draw, int64_t row, std::vector<float>& scaled, std::vector<float>& order) {
    const T* logits = static_cast<const T*>(draw.logits) + row * draw.logits_row;
    const int64_t size = draw.vocabulary;
    const bool greedy = draw.temperature == 0;
    const float factor = greedy ? 1.0f : 1.0f / draw.temperature;
    scaled.resize(size);
    float largest = -std::numeric_limits<float>::infinity();
    int has_nan = 0;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
    for (int64_t i = 0; i < size; ++i) {
        scaled[i] = load(logits + i) * factor;
        largest = std::max(largest, scaled[i]);
        has_nan |= scaled[i] != scaled[i];
    }
    if (has_nan) {  // NaN cannot be ordered, so nothing may be sorted
        draw.tokens[row] = 0;
        draw.logprobs[row] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const bool truncates = !greedy && (draw.top_p < 1 || (draw.top_k > 0 && draw.top_k < size));
    const float least = truncates ? cutoff(scaled, draw, order) : -std::numeric_limits<float>::infinity();
    order.resize(size);  // probabilities, not yet normalised
    std::vector<double> blocks((size + BLOCK - 1) / BLOCK);
    double total = 0;
    for (size_t b = 0; b < blocks.size(); ++b) {
        const int64_t stop = std::min<int64_t>(size, (b + 1) * BLOCK);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * BLOCK; i < stop; ++i) {
            order[i] = scaled[i] >= least ? exp_of_negative(scaled[i] - largest) : 0.0f;
            sum += order[i];
        }
        blocks[b] = sum;
        total += sum;
    }
    int64_t token = 0;
    if (!(total > 0) || !std::isfinite(total)) {  // infinite logits
        draw.tokens[row] = 0;
        draw.logprobs[row] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    if (greedy) {
        while (token + 1 < size && scaled[token] != largest) ++token;
    } else {
        double below = 0, target = double(draw.uniforms[row]) * total;
        size_t b = 0;
        while (b + 1 < blocks.size() && below + blocks[b] <= target) below += blocks[b++];
        token = -1;
        for (int64_t i = b * BLOCK; i < size; ++i) {  // rounding may push the target past the block's end
            if (order[i] <= 0) continue;
            token = i;
            below += order[i];
            if (below > target) break;
        }
        if (token < 0)  // rounding: nothing but zeros from here on
            for (token = size - 1; token > 0 && order[token] <= 0; --token) {}
    }
    draw.tokens[row] = token;
    draw.logprobs[row] = float(double(scaled[token]) - largest - std::log(total));
}

template <typename T>
void draw_rows(const Draw& draw, int threads) {
    in_parallel(threads, [&](int thread, int all) {
        std::vector<float> scaled, order;
        const Share rows(draw.rows, thread, all);
        for (int64_t row = rows.begin; row < rows.end; ++row) draw_row<T>(draw, row, scaled, order);
    });
}

}  // namespace

extern "C" {

void decode_attention(void* out, const void* query, const void* new_key, const void* new_value, void* keys,
                      void* values, const int64_t* spans, const int64_t* sizes, float scale, float softcap,
                      int is_bf16, int threads) {
    const Attention a{out,      query,    new_key,  new_value, keys,     values,   spans,     sizes[0], sizes[1],
                      sizes[2], sizes[3], sizes[4], sizes[5],  sizes[6], sizes[7], sizes[8], sizes[9], sizes[10],
                      sizes[11], scale, softcap};
    is_bf16 ? attend<bf16>(a, threads) : attend<float>(a, threads);
}

void draw_tokens(int64_t* tokens, float* logprobs, const void* logits, const float* uniforms, int64_t rows,
                 int64_t vocabulary, int64_t logits_row, int64_t top_k, double top_p, float temperature, int is_bf16,
                 int threads) {
    const Draw draw{tokens, logprobs, logits, uniforms, rows, vocabulary, logits_row, top_k, top_p, temperature};
    is_bf16 ? draw_rows<bf16>(draw, threads) : draw_rows<float>(draw, threads);
}

// Runs a function on the calling thread; kernels that it calls use a team of this many threads.
void run_with_team(int threads, void (*function)()) { with_team(threads, function); }

// Number of elements of a packed weight; 0 if this processor has no bf16 dot product.
int64_t packed_size(int64_t out_features, int64_t in_features) {
#ifdef __AVX512BF16__
    return (out_features + PANEL - 1) / PANEL * PANEL * ((in_features + 1) / 2 * 2);
#else
    return 0;
#endif
}

void pack(void* packed, const void* weight, int64_t out_features, int64_t in_features, int threads) {
#ifdef __AVX512BF16__
    pack_panels(static_cast<uint16_t*>(packed), static_cast<const uint16_t*>(weight), out_features, in_features,
                threads);
#endif
}

void linear(void* out, const void* x, const void* packed, const void* bias, int64_t rows, int64_t in_features,
            int64_t out_features, int64_t x_row, int threads) {
#ifdef __AVX512BF16__
    multiply(static_cast<uint16_t*>(out), static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(packed),
             static_cast<const uint16_t*>(bias), rows, in_features, out_features, x_row, threads);
#endif
}

}  // extern "C"
