// One call as Python describes it (kernels/native.py has the same fields in the same order), laid out for the tiles.
#pragma once
#include "compose.h"

namespace {

enum Type : int64_t { NONE = 0, FLOAT32 = 1, BFLOAT16 = 2, BOOL = 3, INT64 = 4 };

struct View {
    void* data;
    int64_t type;
    int64_t strides[4];  // in elements: batch, head, position, channel
};

struct Stage {
    View query, key;                                     // factors (batch, heads, length, channels)
    View static_map;                                     // float32, contiguous
    View query_gradient, key_gradient, static_gradient;  // float32
    int64_t groups, query_channels, key_channels;
};

struct Call {
    int (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*);
    int64_t threads;
    int64_t batch, heads, key_heads, queries, keys, channels, value_channels, rank;
    double scaling;
    int64_t is_causal, window, offset;  // window 0: none
    View padding;                       // bool (batch, -, key, -)
    View documents;                     // int64 (batch, -, position, -)
    View dense;                         // bool or float32 (batch, -, query, key)
    View query, key, value, output;     // (batch, heads, length, channels), channels side by side
    View log_sums;                      // float32 (batch, heads, query, -); in the backward pass an input
    View output_gradient, query_gradient, key_gradient, value_gradient;  // gradients float32 but for the first
    Stage pre, post;
    // For `dcformer_compose_block`: scores, then weights, of the queries and keys of a block only, addressed as if all
    // were there.
    View scores;  // (batch, heads, query, key), keys side by side
    int64_t first_query, last_query, first_key, last_key;
};

constexpr float HIDDEN = -INFINITY, LOWEST = -3.0e38f;  // what no score that is visible falls below

template <class AnyCall, class Work>
void in_parallel(const AnyCall& call, int64_t number, const Work& work) {
    auto step = [](int64_t begin, int64_t end, void* data) {
        for (int64_t i = begin; i < end; i++) (*(const Work*)data)(i);
    };
    call.parallel_for(0, number, 1, step, (void*)&work);
}

// Every thread takes the next item as soon as it is free.
template <class Work>
void in_turn(const Call& call, int64_t number, const Work& work) {
    int64_t next = 0;
    in_parallel(call, least(call.threads, number), [&](int64_t thread) {
        for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < number;) work(thread, i);
    });
}

inline int64_t offset_of(const View& view, int64_t b, int64_t h, int64_t l) {
    return b * view.strides[0] + h * view.strides[1] + l * view.strides[2];
}

// `number` elements from `at` on, `step` elements apart, as float32.
inline void read_row(const View& view, int64_t at, int64_t step, int64_t number, float factor, float* to) {
    if (view.type == BFLOAT16) {
        const uint16_t* from = (const uint16_t*)view.data + at;
        for (int64_t i = 0; i < number; i++) to[i] = from_bfloat16(from[i * step]) * factor;
    } else {
        const float* from = (const float*)view.data + at;
        if (step == 1)
            for (int64_t i = 0; i < number; i++) to[i] = from[i] * factor;
        else
            for (int64_t i = 0; i < number; i++) to[i] = from[i * step] * factor;
    }
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
    return {call.heads, stage.groups, (const float*)stage.static_map.data};
}

// Channel c of a side with `channels` of them stands at this place among 2 R + 1 (w1, w2, gate of the padded rank).
inline int64_t place(int64_t c, int64_t channels, int64_t R) {
    const int64_t rank = channels / 2;
    return c < rank ? c : c < 2 * rank ? R + c - rank : 2 * R;
}

// Factors of `number` queries from `first` on: [query][head][2 R + 1], 1 added to the gates; zeros for `padded` more.
inline void read_query_factors(const Call& call, const Stage& stage, int64_t R, int64_t b, int64_t first,
                               int64_t number, int64_t padded, float* to) {
    const int64_t C = 2 * R + 1, H = call.heads, channels = stage.query_channels;
    memset(to, 0, padded * H * C * 4);
    for (int64_t t = 0; t < padded; t++)
        for (int64_t h = 0; h < H; h++) to[(t * H + h) * C + 2 * R] = 1.0f;
    if (stage.query.type == NONE) return;
    float row[2 * 8 + 1];
    for (int64_t h = 0; h < H; h++)
        for (int64_t t = 0; t < number; t++) {
            read_row(stage.query, offset_of(stage.query, b, h, first + t), stage.query.strides[3], channels, 1.0f, row);
            for (int64_t c = 0; c < channels; c++) to[(t * H + h) * C + place(c, channels, R)] += row[c];
        }
}

// Factors of one head's keys of one tile: [2 R + 1][TILE].
inline void read_key_factors(const Call& call, const Stage& stage, int64_t R, int64_t b, int64_t h, int64_t first,
                             float* to) {
    const int64_t C = 2 * R + 1, channels = stage.key_channels, number = least(TILE, call.keys - first);
    if (channels < C || number < TILE) memset(to, 0, C * TILE * 4);
    if (stage.key.type == NONE) return;
    const int64_t at = offset_of(stage.key, b, h, first), step = stage.key.strides[2];
    for (int64_t c = 0; c < channels; c++)
        read_row(stage.key, at + c * stage.key.strides[3], step, number, 1.0f, to + place(c, channels, R) * TILE);
}

// Keys of one tile with the channels first, in panels of PANEL keys: [panel][channel][PANEL].
inline void read_columns(const View& view, int64_t b, int64_t h, int64_t first, int64_t number, int64_t channels,
                         float* to) {
    float row[1024];
    if (number < TILE) memset(to, 0, TILE * channels * 4);
    for (int64_t s = 0; s < number; s++) {
        float* column = to + s / PANEL * PANEL * channels + s % PANEL;
        for (int64_t start = 0; start < channels; start += 1024) {
            const int64_t part = least(1024, channels - start);
            read_row(view, offset_of(view, b, h, first + s) + start, 1, part, 1.0f, row);
            for (int64_t d = 0; d < part; d++) column[(start + d) * PANEL] = row[d];
        }
    }
}

// Positions as rows of `padded` channels, and as many rows as `rows`, filled up with zeros.
inline void read_rows(const View& view, int64_t b, int64_t h, int64_t first, int64_t number, int64_t rows,
                      int64_t channels, int64_t padded, float factor, float* to) {
    for (int64_t s = 0; s < rows; s++, to += padded) {
        if (s < number) read_row(view, offset_of(view, b, h, first + s), 1, channels, factor, to);
        const int64_t filled = s < number ? channels : 0;
        memset(to + filled, 0, (padded - filled) * 4);
    }
}

// What a tile of queries `start` on and keys `first` on shows.
enum Sight { NOTHING, ALL, SOME };

struct Mask {
    float* added;  // [query][TILE]: what is added to a score, HIDDEN where the query does not see the key

    // Fills `added` only where the answer is SOME.
    Sight look(const Call& call, int64_t b, int64_t start, int64_t queries, int64_t first) const {
        const int64_t keys = least(TILE, call.keys - first), low = start + call.offset, high = low + queries - 1;
        const int64_t last = first + keys - 1;
        if (call.is_causal && first > high) return NOTHING;
        if (call.window && (low - last >= call.window || first - high >= call.window)) return NOTHING;
        bool whole = keys == TILE && !(call.is_causal && last > low);
        if (call.window && (high - first >= call.window || last - low >= call.window)) whole = false;
        const bool plain = call.padding.type == NONE && call.documents.type == NONE && call.dense.type == NONE;
        if (whole && plain) return ALL;
        bool any = false, every = keys == TILE;
        for (int64_t t = 0; t < queries; t++) {
            const int64_t position = low + t;
            int64_t from = 0, to = keys;
            if (call.is_causal) to = least(to, position - first + 1);
            if (call.window) {
                from = most(from, position - call.window + 1 - first);
                to = least(to, position + call.window - first);
            }
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

    static void restrict_row(const Call& call, int64_t b, int64_t query, int64_t first, int64_t from, int64_t to,
                             float* row) {
        if (call.padding.type != NONE) {
            const uint8_t* seen = (const uint8_t*)call.padding.data + offset_of(call.padding, b, 0, first);
            for (int64_t s = from; s < to; s++)
                if (!seen[s * call.padding.strides[2]]) row[s] = HIDDEN;
        }
        if (call.documents.type != NONE) {
            const int64_t* ids = (const int64_t*)call.documents.data + b * call.documents.strides[0];
            const int64_t step = call.documents.strides[2], own = ids[query * step];
            for (int64_t s = from; s < to; s++)
                if (ids[(first + s) * step] != own) row[s] = HIDDEN;
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
};

// The masked scores of one query and head; hidden ones whatever they were.
inline void apply_mask(float* scores, const float* added) {
    for (int s = 0; s < TILE; s += LANES) {
        const Vector more = load(added + s), x = load(scores + s);
        store(scores + s, more == HIDDEN ? fill(HIDDEN) : x + more);
    }
}

}  // namespace
