// Attention inside the sequences of a packed row, forward and backward, accumulated in float32 whatever the dtype.
//
// A group is a segment that stands alone, or a prompt and the segments that go on from it. One thread runs a group's
// query heads of one key-value head: it packs their keys and values once, and its sums of key and value gradients need
// no other thread. Blocks of queries run over blocks of keys with the softmax of Dao et al. 2022 (arXiv:2205.14135).
// Scores are kept transposed, by keys: the lanes of a vector are queries, and the softmax needs no sums of lanes. Of
// bfloat16 tensors, P and dS are rounded to bfloat16 for their products where the processor multiplies such pairs.
#include <algorithm>
#include <limits>
#include <vector>

#include "matrix_tiles.h"

namespace {

// Both are multiples of LANES and of ROWS.
constexpr int64_t QUERIES = 96, KEYS = 96;

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
    int64_t token, count;  // in the packed row
    int64_t position;      // of the first one in its sequence
    int64_t segment;       // in the group
    int64_t row;           // of the packed keys
};

template <typename T>
class Group {
  public:
    Group(const Problem& p, bool backward)
        : p(p), backward(backward), keys(p.width), values(p.value_width), queries(p.width), grads(p.value_width),
          outs(p.value_width), probabilities(QUERIES), slopes(QUERIES) {
        for (auto* operand : {&queries, &grads, &outs}) operand->resize(QUERIES);
        for (auto* operand : {&probabilities, &slopes}) operand->resize(KEYS);
        queries_t.resize(queries.words * QUERIES);
        grads_t.resize(grads.words * QUERIES);
        scores.resize(KEYS * QUERIES);
        score_slopes.resize(ROWS * QUERIES);
        sums.resize(QUERIES * std::max(queries.width, grads.width));
    }

    void run(int64_t group, int64_t kv_head) {
        pack(group, kv_head);
        const Span* spans = p.spans + p.groups[group];
        const int64_t heads = p.heads / p.kv_heads;
        for (int64_t segment = 0; segment < p.groups[group + 1] - p.groups[group]; ++segment)
            for (int64_t from = 0; from < spans[segment].length; from += QUERIES) {
                const int64_t rows = std::min(QUERIES, spans[segment].length - from);
                select(spans[segment], segment, from, rows);
                for (int64_t h = 0; h < heads; ++h)
                    backward ? differentiate(spans[segment].start + from, rows, kv_head * heads + h)
                             : attend(spans[segment].start + from, rows, kv_head * heads + h);
            }
        if (backward) unpack(kv_head);
    }

  private:
    struct Visible {
        KeyBlock block;
        int64_t offset;  // the i-th query attends to the block's keys up to the (i + offset)-th
        bool windowed;   // some query does not attend to all of these
    };

    void pack(int64_t group, int64_t kv_head) {
        blocks.clear();
        const Span* spans = p.spans + p.groups[group];
        int64_t rows = 0;
        for (int64_t segment = 0; segment < p.groups[group + 1] - p.groups[group]; ++segment) {
            const Span& span = spans[segment];
            for (int64_t i = 0; i < span.length; i += KEYS) {
                blocks.push_back({span.start + i, std::min(KEYS, span.length - i), span.prefix + i, segment, rows});
                rows += round_up(blocks.back().count, LANES);
            }
        }
        keys.resize(rows);
        values.resize(rows);
        if (backward) {
            key_sums.assign(rows * keys.width, 0.0f);
            value_sums.assign(rows * values.width, 0.0f);
        }
        for (const KeyBlock& block : blocks) {
            const T* key = static_cast<const T*>(p.key) + block.token * p.key_token + kv_head * p.key_head;
            const T* value = static_cast<const T*>(p.value) + block.token * p.value_token + kv_head * p.value_head;
            keys.copy(block.row, key, p.key_token, block.count);
            values.copy(block.row, value, p.value_token, block.count);
            backward ? keys.pair(block.row, block.count) : values.pair(block.row, block.count);
        }
    }

    // The blocks of keys that a block of queries attends to.
    void select(const Span& span, int64_t segment, int64_t from, int64_t rows) {
        visible.clear();
        position = span.prefix + from;
        const int64_t last = position + rows - 1, seen_from = p.first ? p.first[position] : 0;
        for (int64_t i = 0; p.first && i < rows; ++i) first[i] = int32_t(p.first[position + i]);
        for (const KeyBlock& block : blocks) {
            if (block.segment != segment && !(span.prefix && block.segment == 0)) continue;
            if (block.position > last || block.position + block.count <= seen_from) continue;
            visible.push_back({block, position - block.position, p.first && block.position < p.first[last]});
        }
    }

    // Scores of a vector of queries from the i-th on for the block's j-th key, -inf where they do not attend to it.
    lanes masked(lanes score, int64_t i, int64_t j, const Visible& at) const {
        if (!at.windowed && j <= i + at.offset) return score;
        integers seen = counting() >= int32_t(j - i - at.offset);
        if (at.windowed) seen &= load_vector<integers>(first + i) <= int32_t(at.block.position + j);
        return seen ? score : lanes{} - std::numeric_limits<float>::infinity();
    }

    // The first query that attends to a block's j-th key, and the one whose vector holds it.
    static int64_t first_query(int64_t j, const Visible& at) { return std::max<int64_t>(0, j - at.offset); }
    static int64_t first_lane(int64_t j, const Visible& at) { return first_query(j, at) / LANES * LANES; }

    // Number of the block's keys that queries before the end-th attend to.
    static int64_t seen_keys(int64_t end, const Visible& at) {
        return std::max<int64_t>(0, std::min(at.block.count, end + at.offset));
    }

    static int64_t words(int64_t elements) { return (elements + DEPTH<T> - 1) / DEPTH<T>; }

    void attend(int64_t token, int64_t rows, int64_t head) {
        load_queries(token, rows, head);
        alignas(64) float largest[QUERIES], total[QUERIES], rescale[QUERIES];
        std::fill(largest, largest + QUERIES, -1e30f);  // finite, so that a row may see nothing of its first blocks
        std::fill(total, total + QUERIES, 0.0f);
        for (const Visible& at : visible) {
            for (int64_t j = 0; j < at.block.count; j += ROWS) {
                const int64_t from = first_lane(j, at);
                multiply<T>(&scores[j * QUERIES + from], QUERIES, keys.along(at.block.row + j), keys.words, 1,
                            &queries_t[from], QUERIES, rows - from, words(p.width), false);
            }
            for (int64_t i = 0; i < rows; i += LANES) exponentiate(i, at, largest + i, total + i, rescale + i);
            const bool adds = &at != &visible[0];
            for (int64_t r = 0; r < rows && adds; ++r)
                if (rescale[r] != 1.0f)
                    for (int64_t d = 0; d < values.width; ++d) sums[r * values.width + d] *= rescale[r];
            for (int64_t r = 0; r < rows; r += ROWS)
                multiply<T>(&sums[r * values.width], values.width, probabilities.down(0) + r, 1, QUERIES,
                            values.down(at.block.row), values.width, p.value_width, words(seen_keys(r + ROWS, at)),
                            adds);
        }
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(p.to) + ((token + r) * p.heads + head) * p.value_width;
            store_row(out, &sums[r * values.width], p.value_width, 1.0f / total[r]);
            p.logsumexp[head * p.tokens + token + r] = largest[r] + std::log(total[r]);
        }
    }

    // Probabilities of a vector of queries from the i-th on, times their totals, from their scores.
    void exponentiate(int64_t i, const Visible& at, float* largest, float* total, float* rescale) {
        const int64_t seen = seen_keys(i + LANES, at);
        const int64_t plain = at.windowed ? 0 : std::max<int64_t>(0, std::min(seen, i + at.offset + 1));
        const float hidden = -std::numeric_limits<float>::infinity(), factor = p.scale;
        const lanes before = load_lanes(largest);
        lanes highest = before, sum{};
        float* score = &scores[i];
        for (int64_t j = 0; j < plain; ++j, score += QUERIES) {
            const lanes scaled = load_lanes(score) * factor;
            store_lanes(score, scaled);
            highest = larger(highest, scaled);
        }
        for (int64_t j = plain; j < seen; ++j, score += QUERIES) {
            const lanes scaled = masked(load_lanes(score) * factor, i, j, at);
            store_lanes(score, scaled);
            highest = larger(highest, scaled);
        }
        if (seen % 2) store_lanes(score, lanes{} + hidden);
        score = &scores[i];
        float* to = probabilities.down(0) + i;
        for (int64_t j = 0; j < seen; j += 2, score += 2 * QUERIES, to += 2 / DEPTH<T> * QUERIES) {
            const lanes even = exp_of_negative(load_lanes(score) - highest);
            const lanes odd = exp_of_negative(load_lanes(score + QUERIES) - highest);
            sum += even;
            sum += odd;
            store_down<T>(to, QUERIES, even, odd);
        }
        const lanes scale = exp_of_negative(before - highest);
        store_lanes(largest, highest);
        store_lanes(total, load_lanes(total) * scale + sum);
        store_lanes(rescale, scale);
    }

    // Equations of appendix B.4 of Dao et al. 2022: with P = softmax, dV = Pᵀ dO, dS = P (dO Vᵀ - sum(dO O)).
    void differentiate(int64_t token, int64_t rows, int64_t head) {
        load_queries(token, rows, head);
        load_gradients(token, rows, head);
        for (const Visible& at : visible) {
            for (int64_t j = 0; j < at.block.count; j += ROWS) {
                const int64_t from = first_lane(j, at), row = at.block.row + j;
                multiply<T>(&scores[from], QUERIES, keys.along(row), keys.words, 1, &queries_t[from], QUERIES,
                            rows - from, words(p.width), false);
                multiply<T>(&score_slopes[from], QUERIES, values.along(row), values.words, 1, &grads_t[from], QUERIES,
                            rows - from, words(p.value_width), false);
                for (int64_t i = from; i < rows; i += LANES) find_slopes(i, j, at);
                const int64_t query = first_query(j, at);
                multiply<T>(&value_sums[row * values.width], values.width, probabilities.along(j) + query / DEPTH<T>,
                            probabilities.words, 1, grads.down(query), grads.width, p.value_width,
                            words(rows - query), true);
                multiply<T>(&key_sums[row * keys.width], keys.width, slopes.along(j) + query / DEPTH<T>, slopes.words,
                            1, queries.down(query), queries.width, p.width, words(rows - query), true);
            }
            for (int64_t r = 0; r < rows; r += ROWS)
                multiply<T>(&sums[r * keys.width], keys.width, slopes.down(0) + r, 1, QUERIES,
                            keys.down(at.block.row), keys.width, p.width, words(seen_keys(r + ROWS, at)),
                            &at != &visible[0]);
        }
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(p.to) + ((token + r) * p.heads + head) * p.width;
            store_row(out, &sums[r * keys.width], p.width, p.scale);
        }
    }

    // P and dS of a vector of queries from the i-th on and ROWS keys from the j-th on.
    void find_slopes(int64_t i, int64_t j, const Visible& at) {
        const lanes shift = load_lanes(logsumexp + i), mean = load_lanes(delta + i);
        const float factor = p.scale, *score = &scores[i], *score_slope = &score_slopes[i];
        const int64_t count = std::min(ROWS, at.block.count - j), words = probabilities.words;
        const bool plain = !at.windowed && j + count <= i + at.offset + 1;
        float* probability_to = probabilities.along(j) + i / DEPTH<T>;
        float *slope_along = slopes.along(j) + i / DEPTH<T>, *slope_down = slopes.down(j) + i;
        for (int64_t k = 0; k < count; k += 2) {
            lanes probability[2] = {}, gradient[2] = {};
            for (int64_t h = 0; h < 2 && k + h < count; ++h, score += QUERIES, score_slope += QUERIES) {
                const lanes scaled = load_lanes(score) * factor;
                probability[h] = exp_of_negative((plain ? scaled : masked(scaled, i, j + k + h, at)) - shift);
                gradient[h] = probability[h] * (load_lanes(score_slope) - mean);
            }
            store_along<T>(probability_to + k * words, words, probability[0], probability[1]);
            store_along<T>(slope_along + k * words, words, gradient[0], gradient[1]);
            if (DEPTH<T> == 2) store_down<T>(slope_down + k / DEPTH<T> * QUERIES, QUERIES, gradient[0], gradient[1]);
        }
    }

    void load_queries(int64_t token, int64_t rows, int64_t head) {
        const T* query = static_cast<const T*>(p.query) + token * p.query_token + head * p.query_head;
        queries.copy(0, query, p.query_token, rows);
        transpose(queries_t.data(), QUERIES, queries.along(0), queries.words, rows, words(p.width));
        if (backward) queries.pair(0, rows);
    }

    void load_gradients(int64_t token, int64_t rows, int64_t head) {
        const int64_t at = (token * p.heads + head) * p.value_width, stride = p.heads * p.value_width;
        const T *grad = static_cast<const T*>(p.grad_out) + at, *out = static_cast<const T*>(p.out) + at;
        grads.copy(0, grad, stride, rows);
        transpose(grads_t.data(), QUERIES, grads.along(0), grads.words, rows, words(p.value_width));
        grads.pair(0, rows);
        std::fill(logsumexp, logsumexp + QUERIES, 0.0f);
        std::copy_n(p.logsumexp + head * p.tokens + token, rows, logsumexp);
        outs.copy(0, out, stride, rows);
        for (int64_t r = 0; r < rows; r += LANES) {
            alignas(64) float products[LANES * LANES], transposed[LANES * LANES];
            for (int64_t i = 0; i < LANES; ++i) {
                lanes sum{};
                const float *left = grads.along(r + i), *right = outs.along(r + i);
                for (int64_t w = 0; w < grads.words; w += LANES)
                    sum = multiply_add<T>(sum, load_lanes(left + w), load_lanes(right + w));
                store_lanes(products + i * LANES, sum);
            }
            transpose(transposed, LANES, products, LANES, LANES, LANES);
            lanes sum{};
            for (int64_t i = 0; i < LANES; ++i) sum += load_lanes(transposed + i * LANES);
            store_lanes(delta + r, sum);
        }
    }

    void unpack(int64_t kv_head) {
        for (const KeyBlock& block : blocks)
            for (int64_t i = 0; i < block.count; ++i) {
                const int64_t at = (block.token + i) * p.kv_heads + kv_head, row = block.row + i;
                store_row(static_cast<T*>(p.to_key) + at * p.width, &key_sums[row * keys.width], p.width, p.scale);
                store_row(static_cast<T*>(p.to_value) + at * p.value_width, &value_sums[row * values.width],
                          p.value_width, 1.0f);
            }
    }

    const Problem& p;
    const bool backward;
    int64_t position = 0;  // of the first query
    std::vector<KeyBlock> blocks;
    std::vector<Visible> visible;
    Operand<T> keys, values, queries, grads, outs;
    Operand<T> probabilities, slopes;  // P and dS, [keys, QUERIES]
    Buffer queries_t, grads_t;         // words along the rows, transposed
    Buffer scores, score_slopes;       // [keys, QUERIES]
    Buffer sums, key_sums, value_sums;
    alignas(64) int32_t first[QUERIES] = {};  // first position that each query attends to
    alignas(64) float logsumexp[QUERIES], delta[QUERIES];
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
