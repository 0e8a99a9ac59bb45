// From the hidden states of a few tokens to their factors: equations 5, 6 and 8, memory-bound by the weights.
#pragma once
#include "call.h"

namespace {

enum Activation : int64_t { GELU = 0, GELU_TANH = 1, SILU = 2 };

struct FactorsCall {
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
};

inline float activated(float x, int64_t activation) {
    if (activation == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (activation == GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    return x / (1.0f + expf(-x));
}

// `to` [columns] += x[from..to) times those rows of a weight, four rows at a time.
template <class Number, float (*as_float)(Number)>
void add_rows(const Number* __restrict weight, int64_t columns, const float* __restrict x, int64_t from, int64_t to,
              float* __restrict sums) {
    int64_t k = from;
    for (; k + 4 <= to; k += 4) {
        const Number* w = weight + k * columns;
        const float a = x[k], b = x[k + 1], c = x[k + 2], d = x[k + 3];
        for (int64_t j = 0; j < columns; j++)
            sums[j] += a * as_float(w[j]) + b * as_float(w[j + columns]) + c * as_float(w[j + 2 * columns]) +
                       d * as_float(w[j + 3 * columns]);
    }
    for (; k < to; k++)
        for (int64_t j = 0; j < columns; j++) sums[j] += x[k] * as_float(weight[k * columns + j]);
}
inline float same(float x) { return x; }

inline void add_rows(const View& weight, int64_t columns, const float* x, int64_t from, int64_t to, float* sums) {
    if (weight.type == BFLOAT16)
        add_rows<uint16_t, from_bfloat16>((const uint16_t*)weight.data, columns, x, from, to, sums);
    else
        add_rows<float, same>((const float*)weight.data, columns, x, from, to, sums);
}

void compute_factors(const FactorsCall& call) {
    const int64_t tokens = call.batch * call.length, heads = call.heads, R = call.rank, inner = 2 * R * heads;
    const int64_t hidden_columns = call.groups * 4 * inner;
    const int64_t gate_columns = call.gate_weight.type == NONE ? 0 : call.groups * 4 * heads;
    const int64_t columns = rounded_up(hidden_columns, 16) + rounded_up(gate_columns, 16);
    const int64_t workers = most(1, least(call.threads, call.hidden_size * columns >> 16));
    Memory memory(tokens * (call.hidden_size + workers * columns) + 2 * inner + 64);
    float* states = memory.take(tokens * call.hidden_size);
    float* sums = memory.take(workers * tokens * columns);  // [worker][token][hidden columns, gate columns]
    float* low_rank = memory.take(inner);                   // [w1 of each rank, w2 of each rank][head]
    for (int64_t n = 0; n < tokens; n++)
        read_row(call.states, offset_of(call.states, n / call.length, 0, n % call.length), 1, call.hidden_size, 1.0f,
                 states + n * call.hidden_size);
    memset(sums, 0, workers * tokens * columns * 4);
    const auto multiply = [&](int64_t w) {
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
                    write_row(call.factors,
                              i * call.slot_stride + offset_of(call.factors, n / call.length, g * heads + h,
                                                               n % call.length),
                              row, 2 * R + (gate_columns > 0), 1.0f);
                }
            }
}

}  // namespace
