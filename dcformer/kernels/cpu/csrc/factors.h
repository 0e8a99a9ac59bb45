// From the hidden states of a few tokens to what attention takes: rotated queries and keys, values, and factors by
// equations 5, 6 and 8. All of it is bound by reading the weights.
#pragma once
#include "call.h"

namespace {

enum Activation : int64_t { GELU = 0, GELU_TANH = 1 };

struct Projection {
    Threads threads;
    int64_t batch, length, groups, heads, activation;  // heads of a group
    int64_t head_dim, query_heads, key_heads;  // those of the values come last, and are not normalised or rotated
    double norm_eps, query_eps, key_eps;
    View hidden_weight;         // (hidden, groups, 4, inner), contiguous; inner = 2 rank x heads
    View low_rank_weight;       // (groups, 4, inner, 2 rank, heads), contiguous
    View gate_weight;           // (hidden, groups, 4 x heads), contiguous; or nothing
    View weight, bias;          // (rows, hidden), contiguous; no bias, or (rows)
    View query_norm, key_norm;  // (head_dim), or nothing
    View states;                // (batch, -, position, channel), channels contiguous
    View cosine, sine;          // float32 (batch, -, position, rotary channel), or nothing
    View query, key, value;     // (batch, heads, position, head_dim)
    View factors[4];            // (batch, all heads, position, 2 rank + gate) of each slot, or nothing
};

inline float activated(float x, int64_t activation) {
    if (activation == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// `sums` [columns] += x[from..to) times those rows of a weight, four rows at a time.
template <class Weight>
void add_rows(const Weight* weight, int64_t columns, const float* x, int64_t from, int64_t to, float* sums) {
    int64_t k = from;
    for (; k + 4 <= to; k += 4) {
        const Weight *a = weight + k * columns, *b = a + columns, *c = b + columns, *d = c + columns;
        int64_t j = 0;
        for (; j + LANES <= columns; j += LANES)
            store(sums + j, load(sums + j) + load(a + j) * x[k] + load(b + j) * x[k + 1] + load(c + j) * x[k + 2] +
                                load(d + j) * x[k + 3]);
        for (; j < columns; j++)
            sums[j] += as_float(a[j]) * x[k] + as_float(b[j]) * x[k + 1] + as_float(c[j]) * x[k + 2] +
                       as_float(d[j]) * x[k + 3];
    }
    for (; k < to; k++)
        for (int64_t j = 0; j < columns; j++) sums[j] += x[k] * as_float(weight[k * columns + j]);
}

// Products of ROWS_AT_ONCE rows of a weight with a vector: reading several of them at a time keeps memory busy.
constexpr int ROWS_AT_ONCE = 4;
template <int ROWS, class Weight>
void dot_products(const Weight* weight, int64_t row, const float* x, int64_t size, float* to) {
    Vector sums[ROWS][2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const Vector right = load(x + i + j * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) sums[r][j] += load(weight + r * row + i + j * LANES) * right;
        }
    for (int r = 0; r < ROWS; r++) {
        to[r] = sum_of(sums[r][0] + sums[r][1]);
        for (int64_t k = i; k < size; k++) to[r] += as_float(weight[r * row + k]) * x[k];
    }
}
template <class Weight>
void multiply_rows(const Weight* weight, int64_t row, const float* x, int64_t size, int64_t rows, float* to) {
    int64_t r = 0;
    for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE)
        dot_products<ROWS_AT_ONCE>(weight + r * row, row, x, size, to + r);
    for (; r < rows; r++) dot_products<1>(weight + r * row, row, x, size, to + r);
}

// One head of one token, from the weight's rows to what the cache holds. `to` has head_dim floats.
inline void project_head(const Projection& call, int64_t head, int64_t token, const float* x, float* to) {
    const int64_t D = call.head_dim, half = call.cosine.channels / 2;
    const int64_t size = call.states.channels, first = head * D;
    with_numbers(call.weight, first * size, [&](auto* weight) { multiply_rows(weight, size, x, size, D, to); });
    if (call.bias.type != NONE)
        with_numbers(call.bias, first, [&](auto* bias) {
            for (int64_t d = 0; d < D; d++) to[d] += as_float(bias[d]);
        });
    if (head >= call.query_heads + call.key_heads) return;
    const bool of_query = head < call.query_heads;
    const View& norm = of_query ? call.query_norm : call.key_norm;
    if (norm.type != NONE) {
        float squares = 0.0f;
        for (int64_t d = 0; d < D; d++) squares += to[d] * to[d];
        const float factor = 1.0f / sqrtf(squares / D + (float)(of_query ? call.query_eps : call.key_eps));
        with_numbers(norm, 0, [&](auto* weight) {
            for (int64_t d = 0; d < D; d++) to[d] *= as_float(weight[d]) * factor;
        });
    }
    if (half == 0) return;
    const int64_t b = token / call.length, l = token % call.length;
    const float* cosine = (const float*)call.cosine.data + offset_of(call.cosine, b, 0, l);
    const float* sine = (const float*)call.sine.data + offset_of(call.sine, b, 0, l);
    for (int64_t d = 0; d < half; d++) {
        const float first = to[d], second = to[d + half];
        to[d] = first * cosine[d] - second * sine[d];
        to[d + half] = second * cosine[d + half] + first * sine[d + half];
    }
}

void project(const Projection& call) {
    int64_t channels = 0;
    for (const View& factors : call.factors) channels = most(channels, factors.channels);
    const int64_t tokens = call.batch * call.length, heads = call.heads, R = channels / 2, inner = 2 * R * heads;
    const int64_t size = call.states.channels, D = call.head_dim, all_heads = call.query_heads + 2 * call.key_heads;
    const int64_t hidden_columns = call.groups * 4 * inner, first_gate = rounded_up(hidden_columns, 16);
    const int64_t gate_columns = call.gate_weight.type == NONE ? 0 : call.groups * 4 * heads;
    const int64_t columns = first_gate + rounded_up(gate_columns, 16);
    const int64_t workers = most(1, least(call.threads.number, size * (columns + all_heads * D) >> 16));
    const Floats states(tokens * size), rows(workers * D), low_rank(inner);  // [w1 of each rank, w2 of each rank][head]
    const Floats sums(workers * tokens * columns);  // [worker][token][hidden, then gate columns]
    for (int64_t n = 0; n < tokens; n++)
        read_row(call.states, offset_of(call.states, n / call.length, 0, n % call.length), 1, size, 1.0f,
                 states.part(n, size));
    const auto multiply = [&](int64_t w) {
        float* row = rows.part(w, D);
        for (int64_t head = w * all_heads / workers; head < (w + 1) * all_heads / workers; head++) {
            const int64_t other = head - call.query_heads;  // of the keys and values, unless it is negative
            const View& to = other < 0 ? call.query : other < call.key_heads ? call.key : call.value;
            for (int64_t n = 0; n < tokens; n++) {
                project_head(call, head, n, states.part(n, size), row);
                const int64_t number = other < 0 ? head : other % call.key_heads;
                write_row(to, offset_of(to, n / call.length, number, n % call.length), row, D, 1.0f);
            }
        }
        const int64_t from = w * size / workers, to = (w + 1) * size / workers;
        for (int64_t n = 0; n < tokens; n++) {
            float *partial = sums.zeros(w * tokens + n, columns), *x = states.part(n, size);
            const auto add = [&](const View& weight, int64_t number, float* to_columns) {
                with_numbers(weight, 0, [&](auto* rows) { add_rows(rows, number, x, from, to, to_columns); });
            };
            if (R) add(call.hidden_weight, hidden_columns, partial);
            if (gate_columns) add(call.gate_weight, gate_columns, partial + first_gate);
        }
    };
    if (workers == 1) multiply(0);
    else parallel_for(call.threads, workers, multiply);
    float* totals = sums.part(0, tokens * columns);
    for (int64_t w = 1; w < workers; w++) {
        const float* partial = sums.part(w, tokens * columns);
        for (int64_t i = 0; i < tokens * columns; i++) totals[i] += partial[i];
    }

    float* maps = low_rank.part(0, inner);
    for (int64_t n = 0; n < tokens; n++)
        for (int64_t g = 0; g < call.groups; g++)
            for (int64_t slot = g * 4; slot < g * 4 + 4; slot++) {
                const View& factors = call.factors[slot - g * 4];
                if (factors.type == NONE) continue;
                float* hidden = totals + n * columns + slot * inner;
                const float* gates = totals + n * columns + first_gate + slot * heads;
                for (int64_t k = 0; k < inner; k++) {
                    hidden[k] = activated(hidden[k], call.activation);
                    maps[k] = 0.0f;
                }
                with_numbers(call.low_rank_weight, slot * inner * inner,
                             [&](auto* weight) { add_rows(weight, inner, hidden, 0, inner, maps); });
                for (int64_t r = 0; r < R; r++) {
                    float squares = 0.0f;
                    for (int64_t h = 0; h < heads; h++) squares += maps[r * heads + h] * maps[r * heads + h];
                    const float factor = 1.0f / sqrtf(squares / heads + (float)call.norm_eps);
                    for (int64_t h = 0; h < heads; h++) maps[r * heads + h] *= factor;
                }
                for (int64_t h = 0; h < heads; h++) {
                    float row[2 * 8 + 1];
                    for (int64_t r = 0; r < 2 * R; r++) row[r] = maps[r * heads + h];
                    if (gate_columns) row[2 * R] = tanhf(gates[h]);
                    const int64_t at = offset_of(factors, n / call.length, g * heads + h, n % call.length);
                    write_row(factors, at, row, 2 * R + (gate_columns > 0), 1.0f);
                }
            }
}

}  // namespace
