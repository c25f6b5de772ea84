// RMS norms, gated activations and rotary embeddings, forward and backward, each in one pass over its tensors where
// torch takes five to ten. Computed in float32 whatever the tensors' dtype. Matrices are row-major.
#include <algorithm>
#include <vector>

#include "elements.h"

namespace {

// x / sqrt(mean(x^2) + eps) * (weight + shift), accumulated in float32.
template <typename T>
void rms_norm_rows(T* out, const T* x, const T* weight, int64_t rows, int64_t width, float eps, float shift,
                   int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * width;
        T* to = out + row * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) squares += load(from + i) * load(from + i);
        const float inverse = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(to + i, load(from + i) * inverse * (load(weight + i) + shift));
    }
}

// With y = x / rms(x), scaled gradient s = grad (weight + shift): grad_x = (s - y mean(s y)) / rms(x), grad_weight = sum
// over rows of grad y. The latter is summed per part of the rows in float32; null: not wanted.
template <typename T>
void rms_norm_gradients(T* grad_x, T* grad_weight, const T* grad, const T* x, const T* weight, int64_t rows,
                        int64_t width, float eps, float shift, int threads) {
    const int64_t parts = std::min<int64_t>(threads, rows);
    std::vector<float> sums(grad_weight ? parts * width : 0, 0.0f);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; ++part) {
        float* sum = sums.data() + part * width;
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
            const T *from = x + row * width, *g = grad + row * width;
            T* to = grad_x + row * width;
            float squares = 0, product = 0;
#pragma omp simd reduction(+ : squares, product)
            for (int64_t i = 0; i < width; ++i) {
                const float value = load(from + i);
                squares += value * value;
                product += value * load(g + i) * (load(weight + i) + shift);
            }
            const float inverse = 1.0f / std::sqrt(squares / float(width) + eps);
            const float along = product * inverse * inverse * inverse / float(width);
#pragma omp simd
            for (int64_t i = 0; i < width; ++i)
                store(to + i, load(g + i) * (load(weight + i) + shift) * inverse - load(from + i) * along);
            if (!grad_weight) continue;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) sum[i] += load(g + i) * load(from + i) * inverse;
        }
    }
    if (!grad_weight) return;
    for (int64_t i = 0; i < width; ++i) {
        float total = 0;
        for (int64_t part = 0; part < parts; ++part) total += sums[part * width + i];
        store(grad_weight + i, total);
    }
}

// act(gate) * up, where act(x) is x * sigmoid(x), or GELU's tanh form: x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)).
template <typename T>
void gated_rows(T* out, const T* gate, const T* up, int64_t rows, int64_t width, int64_t gate_row, int64_t up_row,
                int gelu, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T* g = gate + row * gate_row;
        const T* u = up + row * up_row;
        T* to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float x = load(g + i);
            const float argument = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
            store(to + i, x * sigmoid(argument) * load(u + i));
        }
    }
}

// With act(x) = x s(a(x)), s the sigmoid: act' = s + x s (1 - s) a'.
template <typename T>
void gated_gradients(T* grad_gate, T* grad_up, const T* grad, const T* gate, const T* up, int64_t size, int gelu,
                     int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < size; ++i) {
        const float x = load(gate + i), g = load(grad + i);
        const float argument = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
        const float slope = gelu ? 1.5957691216f * (1.0f + 0.134145f * x * x) : 1.0f;
        const float s = sigmoid(argument);
        store(grad_up + i, g * x * s);
        store(grad_gate + i, g * load(up + i) * (s + x * s * (1.0f - s) * slope));
    }
}

struct Rotation {
    void* out;        // [rows, tokens, heads, width]
    const void* x;    // [rows, heads, tokens, width]
    const void* cos;  // [rows or 1, tokens, width]
    const void* sin;  // as cos
    int64_t rows, heads, tokens, width;
    int64_t x_row, x_head, x_token, angle_row, angle_token;  // strides
};

// Su et al. 2021 (arXiv:2104.09864), the halves of a head paired: x cos + (-second half, first half) sin; transposed, the
// gradient of x from that of the result.
template <typename T, bool TRANSPOSED>
void rotate_rows(const Rotation& r, int threads) {
    const int64_t half = r.width / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < r.rows * r.tokens; ++task) {
        const int64_t row = task / r.tokens, token = task % r.tokens;
        const T* cos = static_cast<const T*>(r.cos) + row * r.angle_row + token * r.angle_token;
        const T* sin = static_cast<const T*>(r.sin) + row * r.angle_row + token * r.angle_token;
        T* out = static_cast<T*>(r.out) + task * r.heads * r.width;
        for (int64_t head = 0; head < r.heads; ++head, out += r.width) {
            const T* x = static_cast<const T*>(r.x) + row * r.x_row + head * r.x_head + token * r.x_token;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = load(x + i), b = load(x + half + i);
                const float from_b = TRANSPOSED ? load(sin + half + i) : -load(sin + i);
                const float from_a = TRANSPOSED ? -load(sin + i) : load(sin + half + i);
                store(out + i, a * load(cos + i) + b * from_b);
                store(out + half + i, b * load(cos + half + i) + a * from_a);
            }
        }
    }
}

}  // namespace

extern "C" {

void rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t width, float eps, float shift,
              int is_bf16, int threads) {
    const auto run = [&](auto type) {
        using T = decltype(type);
        rms_norm_rows(static_cast<T*>(out), static_cast<const T*>(x), static_cast<const T*>(weight), rows, width, eps,
                      shift, threads);
    };
    is_bf16 ? run(bf16{}) : run(0.0f);
}

void rms_norm_backward(void* grad_x, void* grad_weight, const void* grad, const void* x, const void* weight,
                       int64_t rows, int64_t width, float eps, float shift, int is_bf16, int threads) {
    const auto run = [&](auto type) {
        using T = decltype(type);
        rms_norm_gradients(static_cast<T*>(grad_x), static_cast<T*>(grad_weight), static_cast<const T*>(grad),
                           static_cast<const T*>(x), static_cast<const T*>(weight), rows, width, eps, shift, threads);
    };
    is_bf16 ? run(bf16{}) : run(0.0f);
}

void gated(void* out, const void* gate, const void* up, int64_t rows, int64_t width, int64_t gate_row, int64_t up_row,
           int gelu, int is_bf16, int threads) {
    const auto run = [&](auto type) {
        using T = decltype(type);
        gated_rows(static_cast<T*>(out), static_cast<const T*>(gate), static_cast<const T*>(up), rows, width, gate_row,
                   up_row, gelu, threads);
    };
    is_bf16 ? run(bf16{}) : run(0.0f);
}

void gated_backward(void* grad_gate, void* grad_up, const void* grad, const void* gate, const void* up, int64_t size,
                    int gelu, int is_bf16, int threads) {
    const auto run = [&](auto type) {
        using T = decltype(type);
        gated_gradients(static_cast<T*>(grad_gate), static_cast<T*>(grad_up), static_cast<const T*>(grad),
                        static_cast<const T*>(gate), static_cast<const T*>(up), size, gelu, threads);
    };
    is_bf16 ? run(bf16{}) : run(0.0f);
}

void rotate(void* out, const void* x, const void* cos, const void* sin, const int64_t* sizes, int transposed,
            int is_bf16, int threads) {
    const Rotation r{out,      x,        cos,      sin,      sizes[0], sizes[1], sizes[2],
                     sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8]};
    if (transposed)
        is_bf16 ? rotate_rows<bf16, true>(r, threads) : rotate_rows<float, true>(r, threads);
    else
        is_bf16 ? rotate_rows<bf16, false>(r, threads) : rotate_rows<float, false>(r, threads);
}

}  // extern "C"
