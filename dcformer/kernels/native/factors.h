// From the hidden states of a few tokens to what attention takes: rotated queries and keys, values, and factors by
// equations 5, 6 and 8. All of it is bound by reading the weights.
#pragma once
#include "call.h"

namespace {

enum Activation : int64_t { GELU = 0, GELU_TANH = 1, SILU = 2 };

struct ProjectionCall {
    int (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
    int64_t threads;
    int64_t batch, length, hidden_size, groups, heads, rank, activation;  // heads of a group; rank 0: no low-rank maps
    double norm_eps;
    View states;           // (batch, -, position, channel), channels side by side
    View hidden_weight;    // (hidden, groups, 4, inner), contiguous; inner = 2 rank x heads
    View low_rank_weight;  // (groups, 4, inner, 2 rank, heads), contiguous
    View gate_weight;      // (hidden, groups, 4 x heads), contiguous; or nothing
    View factors;          // (batch, all heads, position, channels) of every slot
    int64_t slot_stride, slots, first_slot, slot_step;
    // Queries, keys and values: `rows` of a weight (rows, hidden) in heads of `head_dim`, of which the first heads are
    // normalised and rotated: `query_heads` of the queries and `key_heads` of the keys.
    int64_t rows, head_dim, query_heads, key_heads, rotary_dim;
    double query_eps, key_eps;
    View weight, bias;          // contiguous; no bias, or (rows)
    View query_norm, key_norm;  // (head_dim), or nothing
    View cosine, sine;          // float32 (batch, -, position, rotary channel), or nothing
    View projected;             // (batch, -, position, row)
};

inline float activated(float x, int64_t activation) {
    if (activation == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (activation == GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return x / (1.0f + expf(-x));
}

inline float number(float x) { return x; }
inline float number(uint16_t x) { return from_bfloat16(x); }

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
            sums[j] +=
                number(a[j]) * x[k] + number(b[j]) * x[k + 1] + number(c[j]) * x[k + 2] + number(d[j]) * x[k + 3];
    }
    for (; k < to; k++)
        for (int64_t j = 0; j < columns; j++) sums[j] += x[k] * number(weight[k * columns + j]);
}

inline void add_rows(const View& weight, int64_t columns, const float* x, int64_t from, int64_t to, float* sums) {
    if (weight.type == BFLOAT16) add_rows((const uint16_t*)weight.data, columns, x, from, to, sums);
    else add_rows((const float*)weight.data, columns, x, from, to, sums);
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
        for (int64_t k = i; k < size; k++) to[r] += number(weight[r * row + k]) * x[k];
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
inline void project_head(const ProjectionCall& call, int64_t head, int64_t token, const float* x, float* to) {
    const int64_t D = call.head_dim, half = call.rotary_dim / 2;
    const int64_t size = call.hidden_size, first = head * D;
    if (call.weight.type == BFLOAT16)
        multiply_rows((const uint16_t*)call.weight.data + first * size, size, x, size, D, to);
    else multiply_rows((const float*)call.weight.data + first * size, size, x, size, D, to);
    if (call.bias.type != NONE)
        for (int64_t d = 0; d < D; d++) {
            float bias;
            read_row(call.bias, first + d, 1, 1, 1.0f, &bias);
            to[d] += bias;
        }
    if (head >= call.query_heads + call.key_heads) return;
    const bool of_query = head < call.query_heads;
    const View& norm = of_query ? call.query_norm : call.key_norm;
    if (norm.type != NONE) {
        float squares = 0.0f;
        for (int64_t d = 0; d < D; d++) squares += to[d] * to[d];
        const float factor = 1.0f / sqrtf(squares / D + (float)(of_query ? call.query_eps : call.key_eps));
        for (int64_t d = 0; d < D; d++) {
            float weight;
            read_row(norm, d, 1, 1, factor, &weight);
            to[d] *= weight;
        }
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

void project(const ProjectionCall& call) {
    const int64_t tokens = call.batch * call.length, heads = call.heads, R = call.rank, inner = 2 * R * heads;
    const int64_t hidden_columns = call.groups * 4 * inner;
    const int64_t gate_columns = call.gate_weight.type == NONE ? 0 : call.groups * 4 * heads;
    const int64_t columns = rounded_up(hidden_columns, 16) + rounded_up(gate_columns, 16);
    const int64_t workers = most(1, least(call.threads, call.hidden_size * (columns + call.rows) >> 16));
    const int64_t all_heads = call.rows / call.head_dim;
    Memory memory(tokens * (call.hidden_size + workers * columns) + 2 * inner + workers * call.head_dim + 1024);
    float* rows = memory.take(workers * call.head_dim);
    float* states = memory.take(tokens * call.hidden_size);
    float* sums = memory.take(workers * tokens * columns);  // [worker][token][hidden columns, gate columns]
    float* low_rank = memory.take(inner);                   // [w1 of each rank, w2 of each rank][head]
    for (int64_t n = 0; n < tokens; n++)
        read_row(call.states, offset_of(call.states, n / call.length, 0, n % call.length), 1, call.hidden_size, 1.0f,
                 states + n * call.hidden_size);
    memset(sums, 0, workers * tokens * columns * 4);
    const auto multiply = [&](int64_t w) {
        for (int64_t head = w * all_heads / workers; head < (w + 1) * all_heads / workers; head++)
            for (int64_t n = 0; n < tokens; n++) {
                float* row = rows + w * call.head_dim;
                project_head(call, head, n, states + n * call.hidden_size, row);
                write_row(call.projected,
                          offset_of(call.projected, n / call.length, 0, n % call.length) + head * call.head_dim, row,
                          call.head_dim, 1.0f);
            }
        const int64_t from = w * call.hidden_size / workers, to = (w + 1) * call.hidden_size / workers;
        for (int64_t n = 0; n < tokens; n++) {
            float* own = sums + (w * tokens + n) * columns;
            const float* x = states + n * call.hidden_size;
            if (R) add_rows(call.hidden_weight, hidden_columns, x, from, to, own);
            if (gate_columns)
                add_rows(call.gate_weight, gate_columns, x, from, to, own + rounded_up(hidden_columns, 16));
        }
    };
    if (workers == 1) multiply(0);
    else in_parallel(call, workers, multiply);
    for (int64_t w = 1; w < workers; w++)
        for (int64_t i = 0; i < tokens * columns; i++) sums[i] += sums[w * tokens * columns + i];

    for (int64_t n = 0; n < tokens; n++)
        for (int64_t g = 0; g < call.groups; g++)
            for (int64_t i = 0; i < call.slots; i++) {
                const int64_t slot = call.first_slot + i * call.slot_step, at = g * 4 + slot;
                float* hidden = sums + n * columns + at * inner;
                const float* gates = sums + n * columns + rounded_up(hidden_columns, 16) + at * heads;
                for (int64_t k = 0; k < inner; k++) {
                    hidden[k] = activated(hidden[k], call.activation);
                    low_rank[k] = 0.0f;
                }
                View maps = call.low_rank_weight;
                maps.data = (char*)maps.data + at * inner * inner * (maps.type == BFLOAT16 ? 2 : 4);
                if (R) add_rows(maps, inner, hidden, 0, inner, low_rank);
                for (int64_t r = 0; r < R; r++) {
                    float squares = 0.0f;
                    for (int64_t h = 0; h < heads; h++) squares += low_rank[r * heads + h] * low_rank[r * heads + h];
                    const float factor = 1.0f / sqrtf(squares / heads + (float)call.norm_eps);
                    for (int64_t h = 0; h < heads; h++) low_rank[r * heads + h] *= factor;
                }
                for (int64_t h = 0; h < heads; h++) {
                    float row[2 * 8 + 1];
                    for (int64_t r = 0; r < 2 * R; r++) row[r] = low_rank[r * heads + h];
                    if (gate_columns) row[2 * R] = tanhf(gates[h]);
                    write_row(
                        call.factors,
                        i * call.slot_stride + offset_of(call.factors, n / call.length, g * heads + h, n % call.length),
                        row, 2 * R + (gate_columns > 0), 1.0f);
                }
            }
}

}  // namespace
