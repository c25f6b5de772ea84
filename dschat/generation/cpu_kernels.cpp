// The two operations of a decoding step that torch is slow at on a CPU: attention of one query token per row against a
// pool of keys and values, and drawing a token from a row of logits. A plain C interface, so that it builds in seconds
// and does not depend on torch's version. Matrices are row-major; "stride" counts elements.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

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
inline float exp_of_negative(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float clamped = x < -87.0f ? -87.0f : x;
    const float n = (clamped * 1.44269504f + shift) - shift;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.98756915e-4f;
    p = p * r + 1.39819994e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666654e-1f;
    p = p * r + 5.00000012e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

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

// WIDTH is the head width where it is known at compile time, else 0.
template <typename T, int WIDTH>
void attend_row(const Attention& a, int64_t row, int64_t kv_head, std::vector<float>& room) {
    const int64_t width = WIDTH ? WIDTH : a.width, value_width = WIDTH ? WIDTH : a.value_width;
    const int64_t group = a.heads / a.kv_heads;
    const int64_t* span = a.spans + 4 * row;
    const int64_t context = span[1] + span[3];
    const int64_t first = a.window && context > a.window ? context - a.window : 0;
    const int64_t length = context - first;
    // The newest token joins the pool before it is attended to.
    const int64_t newest = span[2] + span[3] - 1;
    T* keys = static_cast<T*>(a.keys);
    T* values = static_cast<T*>(a.values);
    const int64_t key_step = a.kv_heads * width, value_step = a.kv_heads * value_width;
    {
        const T* key = static_cast<const T*>(a.new_key) + row * a.key_row + kv_head * a.key_head;
        const T* value = static_cast<const T*>(a.new_value) + row * a.value_row + kv_head * a.value_head;
        std::memcpy(keys + newest * key_step + kv_head * width, key, width * sizeof(T));
        std::memcpy(values + newest * value_step + kv_head * value_width, value, value_width * sizeof(T));
    }
    const int64_t padded = (length + 15) / 16 * 16;
    room.resize(group * padded + group * (width + value_width) + std::max(width, value_width));
    float* scores = room.data();                      // [group, padded]
    float* queries = scores + group * padded;         // [group, width]
    float* sums = queries + group * width;            // [group, value_width]
    float* token = sums + group * value_width;        // [width]
    for (int64_t g = 0; g < group; ++g) {
        const T* query = static_cast<const T*>(a.query) + row * a.query_row + (kv_head * group + g) * a.query_head;
        for (int64_t d = 0; d < width; ++d) queries[g * width + d] = load(query + d) * a.scale;
    }
    // The tokens lie in two runs: of the prompt, which rows share, and of the row's own response.
    const int64_t prompt_from = std::min(first, span[1]), response_from = first - prompt_from;
    const int64_t starts[2] = {span[0] + prompt_from, span[2] + response_from};
    const int64_t counts[2] = {span[1] - prompt_from, span[3] - response_from};
    int64_t at = 0;
    for (int run = 0; run < 2; ++run) {
        const T* key = keys + starts[run] * key_step + kv_head * width;
        for (int64_t i = 0; i < counts[run]; ++i, ++at, key += key_step) {
            if (group == 1) {
                float dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < width; ++d) dot += queries[d] * load(key + d);
                scores[at] = dot;
                continue;
            }
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) token[d] = load(key + d);
            for (int64_t g = 0; g < group; ++g) {
                const float* query = queries + g * width;
                float dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < width; ++d) dot += query[d] * token[d];
                scores[g * padded + at] = dot;
            }
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        float* score = scores + g * padded;
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
        std::fill(sums + g * value_width, sums + (g + 1) * value_width, 0.0f);
    }
    at = 0;
    for (int run = 0; run < 2; ++run) {
        const T* value = values + starts[run] * value_step + kv_head * value_width;
        for (int64_t i = 0; i < counts[run]; ++i, ++at, value += value_step) {
            for (int64_t g = 0; g < group; ++g) {
                const float weight = scores[g * padded + at];
                float* sum = sums + g * value_width;
#pragma omp simd
                for (int64_t d = 0; d < value_width; ++d) sum[d] += weight * load(value + d);
            }
        }
    }
    T* out = static_cast<T*>(a.out) + (row * a.heads + kv_head * group) * value_width;
    for (int64_t i = 0; i < group * value_width; ++i) store(out + i, sums[i]);
}

template <typename T, int WIDTH>
void attend(const Attention& a, int threads) {
    const int64_t tasks = a.rows * a.kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> room;
#pragma omp for schedule(dynamic, 8)
        for (int64_t task = 0; task < tasks; ++task)
            attend_row<T, WIDTH>(a, task / a.kv_heads, task % a.kv_heads, room);
    }
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

// The smallest scaled logit that stays under top-k and top-p; ties with it stay too.
float border(const std::vector<float>& scaled, const Draw& draw, std::vector<float>& order) {
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
        // Candidates are sorted in growing runs: a whole vocabulary is rarely needed.
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
    const float temperature = greedy ? 1.0f : draw.temperature;
    scaled.resize(size);
    float largest = -std::numeric_limits<float>::infinity();
    int strange = 0;
#pragma omp simd reduction(max : largest) reduction(| : strange)
    for (int64_t i = 0; i < size; ++i) {
        scaled[i] = load(logits + i) / temperature;
        largest = std::max(largest, scaled[i]);
        strange |= scaled[i] != scaled[i];
    }
    if (strange) {  // NaN has no place in an order, so nothing may be sorted
        draw.tokens[row] = 0;
        draw.logprobs[row] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const bool truncates = !greedy && (draw.top_p < 1 || (draw.top_k > 0 && draw.top_k < size));
    const float least = truncates ? border(scaled, draw, order) : -std::numeric_limits<float>::infinity();
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
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scaled, order;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < draw.rows; ++row) draw_row<T>(draw, row, scaled, order);
    }
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

}  // extern "C"
