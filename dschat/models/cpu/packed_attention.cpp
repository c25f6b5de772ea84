// Attention inside the sequences of a packed row, forward and backward, in float32 whatever the tensors' dtype.
//
// A group is a segment that stands alone, or a prompt and the segments that go on from it. One thread runs a group's
// query heads of one key-value head: it packs their keys and values once, and its sums of key and value gradients need
// no other thread. Blocks of queries run over blocks of keys with the softmax of Dao et al. 2022 (arXiv:2205.14135).
#include <algorithm>
#include <limits>
#include <vector>

#include "elements.h"

namespace {

// Vectors as wide as the processor's. A tile of ROWS x VECTORS of them, a row of operands and one scalar fill its
// registers. BLOCK is a multiple of ROWS and of VECTORS * LANES.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, ROWS = 4;
#else
constexpr int64_t LANES = 4, ROWS = 4;
#endif
constexpr int64_t VECTORS = 3, BLOCK = 48;
typedef float lanes __attribute__((vector_size(LANES * 4)));

constexpr int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }
inline lanes load_lanes(const float* p) {
    lanes value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
inline void store_lanes(float* p, lanes value) { std::memcpy(p, &value, sizeof value); }

// One tile: c[ROWS, V] (+)= a[ROWS, depth] b[depth, V], V in vectors.
template <int V>
inline void tile(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b,
                 int64_t b_row, int64_t depth, bool adds) {
    lanes sum[ROWS][V];
    for (int64_t r = 0; r < ROWS; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = adds ? load_lanes(c + r * c_row + v * LANES) : lanes{};
    for (int64_t k = 0; k < depth; ++k, a += a_column, b += b_row) {
        lanes operand[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) operand[v] = load_lanes(b + v * LANES);
#pragma GCC unroll 8
        for (int64_t r = 0; r < ROWS; ++r) {
            const float factor = a[r * a_row];
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) sum[r][v] += factor * operand[v];
        }
    }
    for (int64_t r = 0; r < ROWS; ++r)
        for (int v = 0; v < V; ++v) store_lanes(c + r * c_row + v * LANES, sum[r][v]);
}

// c[rows, columns] (+)= a[rows, depth] b[depth, columns]. Rows are rounded up to ROWS and columns to LANES: what the
// operands hold there must be readable, and lands in the same places of c.
void multiply(float* c, int64_t c_row, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
              int64_t rows, int64_t columns, int64_t depth, bool adds) {
    int64_t left = round_up(columns, LANES) / LANES;  // vectors
    for (int64_t panels = (left + VECTORS - 1) / VECTORS; panels > 0; --panels) {
        const int64_t vectors = (left + panels - 1) / panels;  // four as two and two rather than three and one
        for (int64_t r = 0; r < rows; r += ROWS) {
            float* to = c + r * c_row;
            const float* from = a + r * a_row;
            switch (vectors) {
                case 3: tile<3>(to, c_row, from, a_row, a_column, b, b_row, depth, adds); break;
                case 2: tile<2>(to, c_row, from, a_row, a_column, b, b_row, depth, adds); break;
                default: tile<1>(to, c_row, from, a_row, a_column, b, b_row, depth, adds);
            }
        }
        c += vectors * LANES;
        b += vectors * LANES;
        left -= vectors;
    }
}

struct Span {
    int64_t start, length, prefix;  // tokens of the row; prefix: length of the group's first segment if it is attended
};

struct Problem {
    const void *query, *key, *value;  // [tokens, heads, width]
    const void *out, *grad_out;       // backward: [tokens, heads, value_width], contiguous
    void *to, *to_key, *to_value;     // out, or the gradients of query, key and value, contiguous
    float* logsumexp;                 // [heads, tokens]
    const int64_t* groups;            // [group count + 1]: offsets into spans
    const Span* spans;
    const int64_t* first;  // [longest]: first position that each position attends to; null: 0
    int64_t group_count, tokens, heads, kv_heads, width, value_width;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
    float scale;
};

// A block of keys of one segment.
struct KeyBlock {
    int64_t token, count;     // in the packed row
    int64_t position;         // of the first one in its sequence
    int64_t segment;          // in the group
};

template <typename T>
class Group {
  public:
    Group(const Problem& p, bool backward)
        : p(p), backward(backward), width(round_up(p.width, LANES)), value_width(round_up(p.value_width, LANES)) {
        const int64_t widest = std::max(width, value_width);
        for (auto* buffer : {&scores, &slopes}) buffer->assign(BLOCK * BLOCK, 0.0f);
        for (auto* buffer : {&queries, &sums, &grads}) buffer->assign(BLOCK * widest, 0.0f);
    }

    void run(int64_t group, int64_t kv_head) {
        pack(group, kv_head);
        const Span* spans = p.spans + p.groups[group];
        const int64_t heads = p.heads / p.kv_heads;
        for (int64_t segment = 0; segment < p.groups[group + 1] - p.groups[group]; ++segment)
            for (int64_t from = 0; from < spans[segment].length; from += BLOCK) {
                const int64_t rows = std::min(BLOCK, spans[segment].length - from);
                select(spans[segment], segment, from, rows);
                for (int64_t h = 0; h < heads; ++h)
                    backward ? differentiate(spans[segment].start + from, rows, kv_head * heads + h)
                             : attend(spans[segment].start + from, rows, kv_head * heads + h);
            }
        if (backward) unpack(kv_head);
    }

  private:
    struct Visible {
        int64_t block;
        bool masked;
    };

    // Keys, values and their transposes in float32, a block of a segment after the other.
    void pack(int64_t group, int64_t kv_head) {
        blocks.clear();
        const Span* spans = p.spans + p.groups[group];
        for (int64_t segment = 0; segment < p.groups[group + 1] - p.groups[group]; ++segment) {
            const Span& span = spans[segment];
            for (int64_t i = 0; i < span.length; i += BLOCK)
                blocks.push_back({span.start + i, std::min(BLOCK, span.length - i), span.prefix + i, segment});
        }
        const size_t rows = blocks.size() * BLOCK;
        keys_t.assign(rows * p.width, 0.0f);
        values.resize(rows * value_width);
        if (backward) {
            values_t.assign(rows * p.value_width, 0.0f);
            keys.resize(rows * width);
            key_sums.assign(rows * width, 0.0f);
            value_sums.assign(rows * value_width, 0.0f);
        }
        for (size_t b = 0; b < blocks.size(); ++b)
            for (int64_t i = 0; i < blocks[b].count; ++i) {
                const int64_t token = blocks[b].token + i, row = b * BLOCK + i;
                const T* key = static_cast<const T*>(p.key) + token * p.key_token + kv_head * p.key_head;
                const T* value = static_cast<const T*>(p.value) + token * p.value_token + kv_head * p.value_head;
                float* key_t = &keys_t[b * BLOCK * p.width + i];
                for (int64_t d = 0; d < p.width; ++d) key_t[d * BLOCK] = load(key + d);
                copy_row(&values[row * value_width], value, p.value_width, value_width);
                if (!backward) continue;
                copy_row(&keys[row * width], key, p.width, width);
                float* value_t = &values_t[b * BLOCK * p.value_width + i];
                for (int64_t d = 0; d < p.value_width; ++d) value_t[d * BLOCK] = load(value + d);
            }
    }

    // The blocks of keys that a block of queries attends to, and which of them need a mask.
    void select(const Span& span, int64_t segment, int64_t from, int64_t rows) {
        visible.clear();
        position = span.prefix + from;
        const int64_t last = position + rows - 1, seen_from = p.first ? p.first[position] : 0;
        for (size_t b = 0; b < blocks.size(); ++b) {
            const KeyBlock& block = blocks[b];
            if (block.segment != segment && !(span.prefix && block.segment == 0)) continue;
            const int64_t end = block.position + block.count;  // of its positions
            if (block.position > last || end <= seen_from) continue;
            const bool masked = end - 1 > position || (p.first && block.position < p.first[last]) ||
                                block.count % LANES;
            visible.push_back({int64_t(b), masked});
        }
    }

    // scores = queries keysᵀ, -inf where a query does not attend to a key.
    void score(int64_t rows, Visible at) {
        const KeyBlock& block = blocks[at.block];
        multiply(scores.data(), BLOCK, queries.data(), width, 1, &keys_t[at.block * BLOCK * p.width], BLOCK, rows,
                 block.count, p.width, false);
        if (!at.masked) return;
        const float hidden = -std::numeric_limits<float>::infinity();
        const int64_t columns = round_up(block.count, LANES);
        for (int64_t r = 0; r < rows; ++r) {
            float* row = &scores[r * BLOCK];
            const int64_t end = std::min(block.count, position + r + 1 - block.position);
            const int64_t begin = p.first ? p.first[position + r] - block.position : 0;
            for (int64_t j = 0; j < columns; ++j) row[j] = j < begin || j >= end ? hidden : row[j];
        }
    }

    void attend(int64_t token, int64_t rows, int64_t head) {
        load_queries(token, rows, head);
        float largest[BLOCK], total[BLOCK];
        std::fill(largest, largest + BLOCK, -1e30f);  // finite, so that a row may see nothing of its first blocks
        std::fill(total, total + BLOCK, 0.0f);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (const Visible& at : visible) {
            const int64_t count = blocks[at.block].count, columns = round_up(count, LANES);
            score(rows, at);
            for (int64_t r = 0; r < rows; ++r) {
                float* row = &scores[r * BLOCK];
                float highest = largest[r], sum = 0;
#pragma omp simd reduction(max : highest)
                for (int64_t j = 0; j < columns; ++j) highest = std::max(highest, row[j]);
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < columns; ++j) sum += row[j] = exp_of_negative(row[j] - highest);
                const float before = exp_of_negative(largest[r] - highest);
                total[r] = total[r] * before + sum;
                largest[r] = highest;
                if (before != 1.0f)
                    for (int64_t d = 0; d < value_width; ++d) sums[r * value_width + d] *= before;
            }
            multiply(sums.data(), value_width, scores.data(), BLOCK, 1, &values[at.block * BLOCK * value_width],
                     value_width, rows, p.value_width, count, true);
        }
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(p.to) + ((token + r) * p.heads + head) * p.value_width;
            const float inverse = 1.0f / total[r];
            for (int64_t d = 0; d < p.value_width; ++d) store(out + d, sums[r * value_width + d] * inverse);
            p.logsumexp[head * p.tokens + token + r] = largest[r] + std::log(total[r]);
        }
    }

    // Equations of appendix B.4 of Dao et al. 2022: with P = softmax, dV = Pᵀ dO, dS = P (dO Vᵀ - sum(dO O)).
    void differentiate(int64_t token, int64_t rows, int64_t head) {
        load_queries(token, rows, head);
        float delta[BLOCK];
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = ((token + r) * p.heads + head) * p.value_width;
            const T *grad = static_cast<const T*>(p.grad_out) + at, *out = static_cast<const T*>(p.out) + at;
            copy_row(&grads[r * value_width], grad, p.value_width, value_width);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < p.value_width; ++d) sum += load(grad + d) * load(out + d);
            delta[r] = sum;
        }
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (const Visible& at : visible) {
            const int64_t count = blocks[at.block].count, columns = round_up(count, LANES), first = at.block * BLOCK;
            score(rows, at);
            multiply(slopes.data(), BLOCK, grads.data(), value_width, 1, &values_t[first * p.value_width], BLOCK, rows,
                     count, p.value_width, false);
            for (int64_t r = 0; r < rows; ++r) {
                const float logsumexp = p.logsumexp[head * p.tokens + token + r];
                float *score = &scores[r * BLOCK], *slope = &slopes[r * BLOCK];
#pragma omp simd
                for (int64_t j = 0; j < columns; ++j) {
                    score[j] = exp_of_negative(score[j] - logsumexp);
                    slope[j] = score[j] * (slope[j] - delta[r]);
                }
            }
            multiply(&value_sums[first * value_width], value_width, scores.data(), 1, BLOCK, grads.data(), value_width,
                     count, p.value_width, rows, true);
            multiply(&key_sums[first * width], width, slopes.data(), 1, BLOCK, queries.data(), width, count, p.width,
                     rows, true);
            multiply(sums.data(), width, slopes.data(), BLOCK, 1, &keys[first * width], width, rows, p.width, count,
                     true);
        }
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(p.to) + ((token + r) * p.heads + head) * p.width;
            for (int64_t d = 0; d < p.width; ++d) store(out + d, sums[r * width + d] * p.scale);
        }
    }

    void load_queries(int64_t token, int64_t rows, int64_t head) {
        for (int64_t r = 0; r < rows; ++r) {
            const T* query = static_cast<const T*>(p.query) + (token + r) * p.query_token + head * p.query_head;
            for (int64_t d = 0; d < p.width; ++d) queries[r * width + d] = load(query + d) * p.scale;
        }
    }

    void unpack(int64_t kv_head) {
        for (size_t b = 0; b < blocks.size(); ++b)
            for (int64_t i = 0; i < blocks[b].count; ++i) {
                const int64_t at = (blocks[b].token + i) * p.kv_heads + kv_head, row = b * BLOCK + i;
                T* key = static_cast<T*>(p.to_key) + at * p.width;
                T* value = static_cast<T*>(p.to_value) + at * p.value_width;
                for (int64_t d = 0; d < p.width; ++d) store(key + d, key_sums[row * width + d]);
                for (int64_t d = 0; d < p.value_width; ++d) store(value + d, value_sums[row * value_width + d]);
            }
    }

    static void copy_row(float* to, const T* from, int64_t count, int64_t padded) {
        for (int64_t d = 0; d < count; ++d) to[d] = load(from + d);
        std::fill(to + count, to + padded, 0.0f);
    }

    const Problem& p;
    const bool backward;
    const int64_t width, value_width;  // rounded up to LANES
    int64_t position = 0;              // of the first query
    std::vector<KeyBlock> blocks;
    std::vector<Visible> visible;
    std::vector<float> keys_t, keys, values_t, values, key_sums, value_sums;
    std::vector<float> queries, scores, slopes, sums, grads;
};

template <typename T>
void run(const Problem& p, bool backward, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Group<T> group(p, backward);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < p.group_count * p.kv_heads; ++task)
            group.run(task / p.kv_heads, task % p.kv_heads);
    }
}

Problem problem(const int64_t* sizes, const int64_t* groups, const int64_t* spans, const int64_t* first, float scale) {
    Problem p{};
    p.groups = groups;
    p.spans = reinterpret_cast<const Span*>(spans);
    p.first = first;
    p.scale = scale;
    int64_t* fields[] = {&p.group_count, &p.tokens,     &p.heads,    &p.kv_heads,    &p.width,       &p.value_width,
                         &p.query_token, &p.query_head, &p.key_token, &p.key_head, &p.value_token, &p.value_head};
    for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = sizes[i];
    return p;
}

}  // namespace

extern "C" {

void attention(void* out, float* logsumexp, const void* query, const void* key, const void* value,
               const int64_t* sizes, const int64_t* groups, const int64_t* spans, const int64_t* first, float scale,
               int is_bf16, int threads) {
    Problem p = problem(sizes, groups, spans, first, scale);
    p.query = query, p.key = key, p.value = value, p.to = out, p.logsumexp = logsumexp;
    is_bf16 ? run<bf16>(p, false, threads) : run<float>(p, false, threads);
}

void attention_backward(void* grad_query, void* grad_key, void* grad_value, const void* grad_out, const void* out,
                        float* logsumexp, const void* query, const void* key, const void* value, const int64_t* sizes,
                        const int64_t* groups, const int64_t* spans, const int64_t* first, float scale, int is_bf16,
                        int threads) {
    Problem p = problem(sizes, groups, spans, first, scale);
    p.query = query, p.key = key, p.value = value, p.out = out, p.grad_out = grad_out;
    p.to = grad_query, p.to_key = grad_key, p.to_value = grad_value, p.logsumexp = logsumexp;
    is_bf16 ? run<bf16>(p, true, threads) : run<float>(p, true, threads);
}

}  // extern "C"
