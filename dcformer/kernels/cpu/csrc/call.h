// One call as Python describes it, and how its tensors are read into tiles. kernels/cpu/cpu_backend.py has the same
// structures, and compares their sizes when it loads the library.
#pragma once
#include <atomic>

#include "compose.h"

namespace {

enum Type : int64_t { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, BOOL = 3, INT64 = 4 };

struct View {
    void* data;
    int64_t type, channels;
    int64_t strides[4];  // in elements: batch, head, position, channel; 0 where a tensor is the same along one
};

struct Stage {
    View query, key;                                     // factors (batch, heads, length, channels)
    View static_map;                                     // float32, contiguous
    View query_gradient, key_gradient, static_gradient;  // float32
};

// How a loop runs on torch's threads.
struct Threads {
    int (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
    int64_t number;
};

struct Call {
    Threads threads;
    int64_t batch, heads, key_heads, groups, is_causal, sliding_window, query_offset;  // window 0: none
    int64_t first_query, last_query, first_key, last_key;  // all that there are, unless `scores` are given
    double scaling;
    View padding;                    // bool (batch, -, key, -)
    View sequence_ids;               // int64 (batch, -, position, -)
    View dense;                      // bool or float32 (batch, -, query, key)
    View query, key, value, output;  // (batch, heads, length, channels), channels contiguous
    View scores;                     // (batch, heads, query, key) of these queries and keys, keys contiguous
    View log_sums;                   // float32 (batch, heads, query), contiguous; in the backward pass an input
    View output_gradient, query_gradient, key_gradient, value_gradient;  // gradients float32, except the first
    Stage pre, post;
};

constexpr float HIDDEN = -INFINITY, LOWEST = -3.0e38f;  // no visible score is below the latter

// Calls `work` with every number below `number`. Failures, which are messages, are thrown again by the calling thread.
template <class Work>
void parallel_for(const Threads& threads, int64_t number, const Work& work) {
    struct Loop {
        const Work& work;
        std::atomic<const char*> failure;
    } loop{work, {nullptr}};
    auto step = [](int64_t begin, int64_t end, void* data) {
        try {
            for (int64_t i = begin; i < end; i++) ((Loop*)data)->work(i);
        } catch (const char* failure) {
            ((Loop*)data)->failure = failure;
        }
    };
    const int status = threads.parallel_for(0, number, 1, step, &loop);
    if (loop.failure != nullptr) throw loop.failure.load();
    if (status != 0) throw "torch could not run a loop on its threads";
}

// Calls `work` on every thread with a function that yields the next of `number` items, as soon as it is asked.
template <class Work>
void parallel_on_demand(const Threads& threads, int64_t number, const Work& work) {
    std::atomic<int64_t> next{0};
    parallel_for(threads, least(threads.number, number),
                 [&](int64_t) { work([&](int64_t& item) { return (item = next++) < number; }); });
}

inline int64_t offset_of(const View& view, int64_t b, int64_t h, int64_t l) {
    return b * view.strides[0] + h * view.strides[1] + l * view.strides[2];
}

// Calls `use` with a pointer to the numbers from `at` on, in their type.
template <class Use>
void with_numbers(const View& view, int64_t at, const Use& use) {
    if (view.type == BFLOAT16) use((const uint16_t*)view.data + at);
    else use((const float*)view.data + at);
}

template <class Number>
inline void read_numbers(const Number* from, int64_t step, int64_t number, float factor, float* to) {
    if (step == 1)
        for (int64_t i = 0; i < number; i++) to[i] = as_float(from[i]) * factor;
    else
        for (int64_t i = 0; i < number; i++) to[i] = as_float(from[i * step]) * factor;
}

// `number` elements from `at` on, `step` elements apart, as float32.
inline void read_row(const View& view, int64_t at, int64_t step, int64_t number, float factor, float* to) {
    if (view.type == BFLOAT16) read_numbers((const uint16_t*)view.data + at, step, number, factor, to);
    else read_numbers((const float*)view.data + at, step, number, factor, to);
}

inline void write_row(const View& view, int64_t at, const float* from, int64_t number, float factor) {
    if (view.type == BFLOAT16)
        for (int64_t i = 0; i < number; i++) ((uint16_t*)view.data)[at + i] = to_bfloat16(from[i] * factor);
    else
        for (int64_t i = 0; i < number; i++) ((float*)view.data)[at + i] = from[i] * factor;
}

inline bool composes(const Stage& stage) {
    return stage.query.type != NONE || stage.key.type != NONE || stage.static_map.type != NONE;
}
inline Heads heads_of(const Call& call, const Stage& stage) {
    return {call.heads, call.groups, (const float*)stage.static_map.data};
}

// The index of channel c of `channels` factors among 2 R + 1 (w1, w2, gate of the padded rank).
inline int64_t padded_index(int64_t c, int64_t channels, int64_t R) {
    const int64_t rank = channels / 2;
    return c < rank ? c : c < 2 * rank ? R + c - rank : 2 * R;
}

// Factors of `number` queries from `first` on: [query][head][2 R + 1], with 1 added to the gates.
inline void read_query_factors(const Call& call, const Stage& stage, int64_t R, int64_t b, int64_t first,
                               int64_t number, float* to) {
    if (!composes(stage)) return;
    const int64_t C = 2 * R + 1, H = call.heads, channels = stage.query.channels;
    memset(to, 0, number * H * C * 4);
    for (int64_t i = 0; i < number * H; i++) to[i * C + 2 * R] = 1.0f;
    const int64_t step = stage.query.strides[3];
    for (int64_t h = 0; h < H; h++)
        for (int64_t t = 0; t < number; t++)
            with_numbers(stage.query, offset_of(stage.query, b, h, first + t), [&](auto* from) {
                float* row = to + (t * H + h) * C;
                for (int64_t c = 0; c < channels; c++) row[padded_index(c, channels, R)] += as_float(from[c * step]);
            });
}

// Factors of the keys of one tile: [head][2 R + 1][TILE].
inline void read_key_factors(const Call& call, const Stage& stage, int64_t R, int64_t b, int64_t first, float* to) {
    if (!composes(stage)) return;
    const int64_t C = 2 * R + 1, channels = stage.key.channels, number = least(TILE, call.last_key - first);
    if (channels < C || number < TILE) memset(to, 0, call.heads * C * TILE * 4);
    for (int64_t h = 0; h < call.heads; h++, to += C * TILE) {
        const int64_t at = offset_of(stage.key, b, h, first), step = stage.key.strides[2];
        for (int64_t c = 0; c < channels; c++)
            read_row(stage.key, at + c * stage.key.strides[3], step, number, 1.0f,
                     to + padded_index(c, channels, R) * TILE);
    }
}

// Gradients of one head's factors at `number` positions: [2 R + 1][step].
inline void write_factors(const View& view, int64_t R, int64_t b, int64_t h, int64_t first, int64_t number,
                          const float* from, int64_t step) {
    float* to = (float*)view.data + offset_of(view, b, h, first);
    for (int64_t c = 0; c < view.channels; c++)
        for (int64_t s = 0; s < number; s++)
            to[c * view.strides[3] + s * view.strides[2]] = from[padded_index(c, view.channels, R) * step + s];
}

// Keys of one tile with the channels first, in panels of PANEL keys: [panel][channel][PANEL].
inline void read_columns(const View& view, int64_t b, int64_t h, int64_t first, int64_t number, int64_t channels,
                         float* to) {
    if (number < TILE) memset(to, 0, TILE * channels * 4);
    for (int64_t s = 0; s < number; s++)
        with_numbers(view, offset_of(view, b, h, first + s), [&](auto* from) {
            float* column = to + s / PANEL * PANEL * channels + s % PANEL;
            for (int64_t d = 0; d < channels; d++) column[d * PANEL] = as_float(from[d]);
        });
}

// Positions as rows of `padded` channels, and as many rows as `rows`, filled up with zeros.
inline void read_rows(const View& view, int64_t b, int64_t h, int64_t first, int64_t number, int64_t rows,
                      int64_t channels, int64_t padded, float factor, float* to) {
    for (int64_t s = 0; s < rows; s++, to += padded) {
        if (s < number) read_row(view, offset_of(view, b, h, first + s), 1, channels, factor, to);
        const int64_t filled = s < number ? channels : 0;
        if (filled < padded) memset(to + filled, 0, (padded - filled) * 4);
    }
}

// What the queries of a tile see of its keys.
enum Visible { NOTHING, ALL, SOME };

inline void restrict_row(const Call& call, int64_t b, int64_t query, int64_t first, int64_t from, int64_t to,
                         float* row) {
    if (call.padding.type != NONE) {
        const uint8_t* seen = (const uint8_t*)call.padding.data + offset_of(call.padding, b, 0, first);
        for (int64_t s = from; s < to; s++)
            if (!seen[s * call.padding.strides[2]]) row[s] = HIDDEN;
    }
    if (call.sequence_ids.type != NONE) {
        const int64_t* ids = (const int64_t*)call.sequence_ids.data + b * call.sequence_ids.strides[0];
        const int64_t step = call.sequence_ids.strides[2], document = ids[query * step];
        for (int64_t s = from; s < to; s++)
            if (ids[(first + s) * step] != document) row[s] = HIDDEN;
    }
    if (call.dense.type != NONE) {
        const int64_t at = offset_of(call.dense, b, 0, query), step = call.dense.strides[3];
        for (int64_t s = from; s < to; s++) {
            if (call.dense.type == BOOL) {
                if (!((const uint8_t*)call.dense.data)[at + (first + s) * step]) row[s] = HIDDEN;
            } else {
                const float bias = ((const float*)call.dense.data)[at + (first + s) * step];
                row[s] = bias <= -1.7e38f ? HIDDEN : row[s] + bias;
            }
        }
    }
}

// The rule which key a query sees, as visibility_dcformer.py states it: of `queries` from `start` on and the tile of
// keys from `first` on. Only where the answer is SOME, `added` holds what
// is added to the scores, [query][TILE]: HIDDEN where the query does not see the key.
inline Visible visible_keys(const Call& call, int64_t b, int64_t start, int64_t queries, int64_t first, float* added) {
    const int64_t keys = least(TILE, call.last_key - first), low = start + call.query_offset, high = low + queries - 1;
    const int64_t last = first + keys - 1, window = call.sliding_window ? call.sliding_window : INT64_MAX;
    if ((call.is_causal && first > high) || low - last >= window || first - high >= window) return NOTHING;
    const bool whole = keys == TILE && !(call.is_causal && last > low) && high - first < window && last - low < window;
    const bool plain = call.padding.type == NONE && call.sequence_ids.type == NONE && call.dense.type == NONE;
    if (whole && plain) return ALL;
    bool any = false, every = keys == TILE;
    for (int64_t t = 0; t < queries; t++) {
        const int64_t position = low + t;
        int64_t from = 0, to = keys;
        if (call.is_causal) to = least(to, position - first + 1);
        if (call.sliding_window)
            from = most(from, position - window + 1 - first), to = least(to, position + window - first);
        float* row = added + t * TILE;
        for (int64_t s = 0; s < TILE; s++) row[s] = s >= from && s < to ? 0.0f : HIDDEN;
        if (!plain) restrict_row(call, b, start + t, first, most(from, 0), to, row);
        for (int64_t s = 0; s < TILE; s++) {
            any |= row[s] != HIDDEN;
            every &= row[s] == 0.0f;
        }
    }
    return every ? ALL : any ? SOME : NOTHING;
}

// The masked scores of one query and head; hidden ones whatever they were.
inline void apply_mask(float* scores, const float* added) {
    for (int s = 0; s < TILE; s += LANES) {
        const Vector more = load(added + s), x = load(scores + s);
        store(scores + s, more == HIDDEN ? fill(HIDDEN) : x + more);
    }
}

}  // namespace
