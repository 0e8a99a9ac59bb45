// Composed attention for CPUs: scores, composition, softmax, composition and values on tiles that stay in the cache.
//
// A block of queries keeps its exponentials over all keys that it sees; nothing else is quadratic. A first sweep over
// tiles of keys makes scores, composes and masks them and takes e^(x - largest so far); a second one scales that by
// what the whole row turned out to be, composes it and multiplies it with the values. The backward pass computes both
// again.
#include <alloca.h>
#include <type_traits>

#include "call.h"
#include "factors.h"

namespace {

constexpr int64_t BLOCK = 48;  // queries: a multiple of ROWS that makes enough of every key that is read
static_assert(BLOCK % ROWS == 0, "blocks hold whole blocks of rows");
constexpr int64_t FEW = 8;  // queries that do not pay for laying keys and values out

struct Sizes {
    int64_t batch, heads, key_heads, served, queries, channels, value_channels, value_row, key_row, tiles, blocks, rows;
    int64_t tiles_in_sight;                                       // of one block, at most
    int64_t keys_of_tile, values_of_tile, factors_of_tile, tile;  // floats
    bool pre, post;

    Sizes(const Call& call, int64_t C, int64_t most_rows)
        : batch(call.batch),
          heads(call.heads),
          key_heads(call.key_heads),
          served(call.heads / call.key_heads),
          queries(call.queries),
          channels(call.channels),
          value_channels(call.value_channels),
          value_row(rounded_up(call.value_channels, LANES)),
          key_row(rounded_up(call.channels, LANES)),
          tiles((call.keys + TILE - 1) / TILE),
          tiles_in_sight(tiles),
          pre(composes(call.pre)),
          post(composes(call.post)) {
        if (call.window) tiles_in_sight = least(tiles, (2 * call.window + most_rows) / TILE + 2);
        // All scores of a block are in memory at once, in 64 MB where the block can be that small.
        const int64_t affordable = (1 << 24) / (heads * tiles_in_sight * TILE) / ROWS * ROWS;
        rows = least(least(most_rows, rounded_up(queries, ROWS)), most(affordable, least(most_rows, ROWS)));
        blocks = (queries + rows - 1) / rows;
        keys_of_tile = key_heads * channels * TILE;
        values_of_tile = key_heads * value_row * TILE;
        factors_of_tile = heads * C * TILE;
        tile = rows * heads * TILE;
    }
};

// Keys, values and factors of all tiles, as float32 in the order in which they are read: rows of channels, or columns
// of them as `read_columns` lays them out.
template <int R>
struct Packed {
    float *key_columns, *key_rows = nullptr, *value_columns = nullptr, *value_rows = nullptr, *pre, *post;
    Memory memory;

    Packed(const Call& call, const Sizes& sizes, bool backward)
        : memory(sizes.batch * sizes.tiles *
                 (sizes.keys_of_tile +
                  (backward ? sizes.key_heads * (sizes.key_row + sizes.value_channels) * TILE : sizes.values_of_tile) +
                  (sizes.pre + sizes.post) * sizes.factors_of_tile)) {
        const int64_t number = sizes.batch * sizes.tiles, KH = sizes.key_heads;
        key_columns = memory.take(number * sizes.keys_of_tile);
        if (backward) key_rows = memory.take(number * KH * sizes.key_row * TILE);
        if (backward) value_columns = memory.take(number * KH * sizes.value_channels * TILE);
        if (!backward) value_rows = memory.take(number * sizes.values_of_tile);
        pre = memory.take(number * sizes.pre * sizes.factors_of_tile);
        post = memory.take(number * sizes.post * sizes.factors_of_tile);
        in_turn(call, number, [&](int64_t, int64_t i) {
            const int64_t b = i / sizes.tiles, first = i % sizes.tiles * TILE, here = least(TILE, call.keys - first);
            for (int64_t h = 0; h < KH; h++) {
                read_columns(call.key, b, h, first, here, sizes.channels,
                             key_columns + (i * KH + h) * sizes.channels * TILE);
                if (backward) {
                    read_columns(call.value, b, h, first, here, sizes.value_channels,
                                 value_columns + (i * KH + h) * sizes.value_channels * TILE);
                    read_rows(call.key, b, h, first, here, TILE, sizes.channels, sizes.key_row, 1.0f,
                              key_rows + (i * KH + h) * sizes.key_row * TILE);
                } else {
                    read_rows(call.value, b, h, first, here, TILE, sizes.value_channels, sizes.value_row, 1.0f,
                              value_rows + (i * KH + h) * sizes.value_row * TILE);
                }
            }
            for (int64_t h = 0; h < sizes.heads; h++) {
                const int64_t at = i * sizes.factors_of_tile + h * CHANNELS<R> * TILE;
                if (sizes.pre) read_key_factors(call, call.pre, R, b, h, first, pre + at);
                if (sizes.post) read_key_factors(call, call.post, R, b, h, first, post + at);
            }
        });
    }
};

// The softmax of some queries, tile by tile: largest score and sum of exponentials so far, [query][head] each.
struct Softmax {
    int64_t heads;
    float *largest, *sums;

    void begin(int64_t queries) const {
        for (int64_t i = 0; i < queries * heads; i++) largest[i] = LOWEST, sums[i] = 0.0f;
    }

    // One query's scores [head][TILE] become e^(score - largest so far), which is noted in `at_tile` [head].
    void add_tile(int64_t query, float* scores, float* at_tile) const {
        float *own_largest = largest + query * heads, *own_sums = sums + query * heads;
        for (int64_t h = 0; h < heads; h++) {
            float* x = scores + h * TILE;
            Vector top = load(x);
            for (int s = LANES; s < TILE; s += LANES) top = larger(load(x + s), top);
            const float now = largest_of(top), before = own_largest[h];
            at_tile[h] = now > before ? now : before;
        }
        for (int64_t h = 0; h < heads; h++) {
            float* x = scores + h * TILE;
            const float top = at_tile[h];
            Vector sum{};
            for (int s = 0; s < TILE; s += LANES) {
                const Vector e = exponential(load(x + s) - top);
                store(x + s, e);
                sum += e;
            }
            if (top != own_largest[h]) own_sums[h] *= expf(own_largest[h] - top);
            own_sums[h] += sum_of(sum);
            own_largest[h] = top;
        }
    }

    // By what the exponentials of a tile are to be multiplied, in place of `at_tile` [head].
    void scales(int64_t query, float* at_tile) const {
        for (int64_t h = 0; h < heads; h++) {
            const int64_t i = query * heads + h;
            const float part = at_tile[h] == largest[i] ? 1.0f : expf(at_tile[h] - largest[i]);
            at_tile[h] = sums[i] == 0.0f ? 0.0f : part / sums[i];
        }
    }
};

inline void scale_tile(float* tile, int64_t queries, int64_t heads, const float* scale) {
    for (int64_t i = 0; i < queries * heads; i++)
        for (int s = 0; s < TILE; s += LANES) store(tile + i * TILE + s, load(tile + i * TILE + s) * scale[i]);
}

template <int R>
struct Forward {
    const Call& call;
    const Sizes sizes;
    const Packed<R> packed;

    explicit Forward(const Call& c) : call(c), sizes(c, CHANNELS<R>, BLOCK), packed(c, sizes, false) {}

    void run() {
        in_parallel(call, least(call.threads, sizes.batch * sizes.blocks), [&](int64_t) {
            const int64_t rows = sizes.rows, H = sizes.heads;
            Memory memory(sizes.tiles_in_sight * (sizes.tile + rows * H) +
                          rows * H * (sizes.channels + sizes.value_row + 2) + rows * H * CHANNELS<R> * 2 + rows * TILE +
                          H * LANES * 4);
            for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < sizes.batch * sizes.blocks;) {
                memory.next = memory.start;
                block(i % sizes.batch, sizes.blocks - 1 - i / sizes.batch, memory);
            }
        });
    }
    int64_t next = 0;

    void block(int64_t b, int64_t number, Memory& memory) const {
        constexpr int C = CHANNELS<R>;
        const int64_t rows = sizes.rows, H = sizes.heads, start = number * rows;
        const int64_t queries = least(rows, sizes.queries - start), row = H * TILE;
        float* query = memory.take(H * rows * sizes.channels);
        float* output = memory.take(H * rows * sizes.value_row);
        float* pre = memory.take(rows * H * C);
        float* post = memory.take(rows * H * C);
        float* scratch = memory.take(H * LANES * 4);
        const Mask mask{memory.take(rows * TILE)};
        const Softmax softmax{H, memory.take(rows * H), memory.take(rows * H)};
        float* at_tiles = memory.take(sizes.tiles_in_sight * rows * H);
        float* scores = memory.take(sizes.tiles_in_sight * sizes.tile);
        for (int64_t h = 0; h < H; h++)
            read_rows(call.query, b, h, start, queries, rows, sizes.channels, sizes.channels, call.scaling,
                      query + h * rows * sizes.channels);
        if (sizes.pre) read_query_factors(call, call.pre, R, b, start, queries, rows, pre);
        if (sizes.post) read_query_factors(call, call.post, R, b, start, queries, rows, post);
        memset(output, 0, H * rows * sizes.value_row * 4);
        softmax.begin(rows);

        int64_t used = 0;
        int64_t* seen = (int64_t*)alloca(sizes.tiles * sizeof(int64_t));  // the tiles that are not hidden altogether
        for (int64_t j = 0; j < sizes.tiles; j++) {
            const Sight sight = mask.look(call, b, start, queries, j * TILE);
            if (sight == NOTHING) continue;
            const int64_t i = b * sizes.tiles + j;
            float *tile = scores + used * sizes.tile, *at_tile = at_tiles + used * rows * H;
            for (int64_t h = 0; h < H; h++)
                product<false>(rows, TILE, sizes.channels, query + h * rows * sizes.channels, sizes.channels, 1,
                               packed.key_columns + i * sizes.keys_of_tile + h / sizes.served * sizes.channels * TILE,
                               sizes.channels * PANEL, PANEL, tile + h * TILE, row);
            if (sizes.pre)
                compose<R, false>(tile, tile, queries, heads_of(call, call.pre), pre,
                                  packed.pre + i * sizes.factors_of_tile, nullptr, scratch);
            for (int64_t t = 0; t < queries; t++) {
                if (sight == SOME)
                    for (int64_t h = 0; h < H; h++) apply_mask(tile + t * row + h * TILE, mask.added + t * TILE);
                softmax.add_tile(t, tile + t * row, at_tile + t * H);
            }
            seen[used++] = j;
        }
        while (used-- > 0) {  // the last tile is still in the cache
            const int64_t i = b * sizes.tiles + seen[used];
            float *tile = scores + used * sizes.tile, *at_tile = at_tiles + used * rows * H;
            for (int64_t t = 0; t < queries; t++) softmax.scales(t, at_tile + t * H);
            if (sizes.post)
                compose<R, true>(tile, tile, queries, heads_of(call, call.post), post,
                                 packed.post + i * sizes.factors_of_tile, at_tile, scratch);
            else scale_tile(tile, queries, H, at_tile);
            for (int64_t h = 0; h < H; h++)
                product<true>(rows, sizes.value_row, TILE, tile + h * TILE, row, 1,
                              packed.value_rows + i * sizes.values_of_tile + h / sizes.served * sizes.value_row * TILE,
                              PANEL, sizes.value_row, output + h * rows * sizes.value_row, sizes.value_row);
        }
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < queries; t++) {
                write_row(call.output, offset_of(call.output, b, h, start + t),
                          output + (h * rows + t) * sizes.value_row, sizes.value_channels, 1.0f);
                if (call.log_sums.type != NONE) {
                    const float sum = softmax.sums[t * H + h];
                    ((float*)call.log_sums.data)[offset_of(call.log_sums, b, h, start + t)] =
                        sum == 0.0f ? INFINITY : softmax.largest[t * H + h] + logf(sum);
                }
            }
    }
};

// A few queries, as in decoding: keys and values are read once, where they lie, and nothing of them is laid out anew.
template <int R>
struct FewQueries {
    static constexpr int C = CHANNELS<R>;
    const Call& call;
    const Sizes sizes;

    explicit FewQueries(const Call& c) : call(c), sizes(c, C, c.queries) {}

    struct Tile {
        int64_t b, first;
        bool is_whole;
        float *scores, *largest, *sums;  // [query][head][TILE], [query][head] each
    };

    void run() const {
        const int64_t Q = sizes.queries, H = sizes.heads, number = sizes.batch * sizes.tiles, heads = Q * H;
        Memory looked(Q * TILE);
        Tile* tiles = (Tile*)malloc(number * sizeof(Tile));
        int64_t used = 0;
        for (int64_t i = 0; i < number; i++) {
            Tile& tile = tiles[used];
            tile.b = i / sizes.tiles, tile.first = i % sizes.tiles * TILE;
            const Sight sight = Mask{looked.start}.look(call, tile.b, 0, Q, tile.first);
            tile.is_whole = sight == ALL;
            used += sight != NOTHING;
        }
        const int64_t workers = most(1, least(call.threads, used)), row = heads * sizes.value_row;
        Memory memory(sizes.batch * heads * (2 * C + sizes.channels) + used * heads * (TILE + 2) + used * 48 +
                      workers * sizes.batch * row);
        float* query = memory.take(sizes.batch * heads * sizes.channels);  // [batch][query][head][channel]
        float *pre = memory.take(sizes.batch * heads * C), *post = memory.take(sizes.batch * heads * C);
        float* outputs = memory.take(workers * sizes.batch * row);  // [worker][batch][query][head][channel]
        for (int64_t i = 0; i < used; i++)
            tiles[i].scores = memory.take(heads * TILE), tiles[i].largest = memory.take(heads),
            tiles[i].sums = memory.take(heads);
        memset(outputs, 0, workers * sizes.batch * row * 4);
        for (int64_t b = 0; b < sizes.batch; b++) {
            for (int64_t t = 0; t < Q; t++)
                for (int64_t h = 0; h < H; h++)
                    read_row(call.query, offset_of(call.query, b, h, t), 1, sizes.channels, call.scaling,
                             query + ((b * Q + t) * H + h) * sizes.channels);
            if (sizes.pre) read_query_factors(call, call.pre, R, b, 0, Q, Q, pre + b * heads * C);
            if (sizes.post) read_query_factors(call, call.post, R, b, 0, Q, Q, post + b * heads * C);
        }
        in_parallel(call, workers, [&](int64_t w) {
            Memory own(scratch_floats());
            for (int64_t i = w * used / workers; i < (w + 1) * used / workers; i++)
                score(tiles[i], query + tiles[i].b * heads * sizes.channels, pre + tiles[i].b * heads * C, own);
        });
        Memory totals(sizes.batch * heads * 2);
        const Softmax softmax{1, totals.take(sizes.batch * heads), totals.take(sizes.batch * heads)};
        softmax.begin(sizes.batch * heads);
        for (int64_t i = 0; i < used; i++)
            for (int64_t k = 0, total = tiles[i].b * heads; k < heads; k++, total++)
                if (tiles[i].largest[k] > softmax.largest[total]) softmax.largest[total] = tiles[i].largest[k];
        for (int64_t i = 0; i < used; i++)
            for (int64_t k = 0, total = tiles[i].b * heads; k < heads; k++, total++)
                softmax.sums[total] += tiles[i].sums[k] * expf(tiles[i].largest[k] - softmax.largest[total]);
        in_parallel(call, workers, [&](int64_t w) {
            Memory own(scratch_floats());
            for (int64_t i = w * used / workers; i < (w + 1) * used / workers; i++) {
                const int64_t b = tiles[i].b;
                for (int64_t k = 0; k < heads; k++) softmax.scales(b * heads + k, tiles[i].largest + k);
                sum_values(tiles[i], post + b * heads * C, outputs + (w * sizes.batch + b) * row, own);
            }
        });
        for (int64_t w = 1; w < workers; w++)
            for (int64_t i = 0; i < sizes.batch * row; i++) outputs[i] += outputs[w * sizes.batch * row + i];
        for (int64_t b = 0; b < sizes.batch; b++)
            for (int64_t t = 0; t < Q; t++)
                for (int64_t h = 0; h < H; h++)
                    write_row(call.output, offset_of(call.output, b, h, t),
                              outputs + ((b * Q + t) * H + h) * sizes.value_row, sizes.value_channels, 1.0f);
        free(tiles);
    }

    int64_t scratch_floats() const {
        return sizes.factors_of_tile + TILE * (sizes.queries + most(sizes.value_row, 4 * sizes.channels)) +
               4 * sizes.heads * LANES;
    }

    void score(const Tile& tile, const float* query, const float* pre, Memory& own) const {
        const int64_t Q = sizes.queries, H = sizes.heads, D = sizes.channels,
                      here = least(TILE, call.keys - tile.first);
        own.next = own.start;
        float *factors = own.take(sizes.factors_of_tile), *scratch = own.take(4 * H * LANES);
        float *rows = own.take(TILE * D), *added = own.take(Q * TILE);
        for (int64_t h = 0; h < H; h++) {
            const float* keys = (const float*)call.key.data + offset_of(call.key, tile.b, h / sizes.served, tile.first);
            int64_t step = call.key.strides[2];
            if (call.key.type != FLOAT32) {
                if (h % sizes.served == 0)
                    read_rows(call.key, tile.b, h / sizes.served, tile.first, here, here, D, D, 1.0f, rows);
                keys = rows, step = D;
            }
            for (int64_t t = 0; t < Q; t++) {
                float* to = tile.scores + (t * H + h) * TILE;
                multiply_rows(keys, step, query + (t * H + h) * D, D, here, to);
                for (int64_t s = here; s < TILE; s++) to[s] = 0.0f;
            }
            if (sizes.pre) read_key_factors(call, call.pre, R, tile.b, h, tile.first, factors + h * C * TILE);
        }
        if (sizes.pre)
            compose<R, false>(tile.scores, tile.scores, Q, heads_of(call, call.pre), pre, factors, nullptr, scratch);
        if (!tile.is_whole) Mask{added}.look(call, tile.b, 0, Q, tile.first);
        const Softmax softmax{H, tile.largest, tile.sums};
        softmax.begin(Q);
        for (int64_t t = 0; t < Q; t++) {
            if (!tile.is_whole)
                for (int64_t h = 0; h < H; h++) apply_mask(tile.scores + (t * H + h) * TILE, added + t * TILE);
            softmax.add_tile(t, tile.scores + t * H * TILE, tile.largest + t * H);
        }
    }

    void sum_values(const Tile& tile, const float* post, float* output, Memory& own) const {
        const int64_t Q = sizes.queries, H = sizes.heads, here = least(TILE, call.keys - tile.first);
        own.next = own.start;
        float *factors = own.take(sizes.factors_of_tile), *scratch = own.take(4 * H * LANES);
        float* rows = own.take(TILE * sizes.value_row);
        if (sizes.post) {
            for (int64_t h = 0; h < H; h++)
                read_key_factors(call, call.post, R, tile.b, h, tile.first, factors + h * C * TILE);
            compose<R, true>(tile.scores, tile.scores, Q, heads_of(call, call.post), post, factors, tile.largest,
                             scratch);
        } else {
            scale_tile(tile.scores, Q, H, tile.largest);
        }
        const bool as_they_lie = call.value.type == FLOAT32 && sizes.value_channels == sizes.value_row;
        for (int64_t h = 0; h < H; h++) {
            const int64_t key_head = h / sizes.served;
            const float* values = (const float*)call.value.data + offset_of(call.value, tile.b, key_head, tile.first);
            int64_t step = call.value.strides[2];
            if (!as_they_lie) {
                if (h % sizes.served == 0)
                    read_rows(call.value, tile.b, key_head, tile.first, here, here, sizes.value_channels,
                              sizes.value_row, 1.0f, rows);
                values = rows, step = sizes.value_row;
            }
            for (int64_t t = 0; t < Q; t++) {
                const float* weights = tile.scores + (t * H + h) * TILE;
                float* to = output + (t * H + h) * sizes.value_row;
                int64_t d = 0;
                for (; d + 8 * LANES <= sizes.value_row; d += 8 * LANES)
                    product_in_registers<1, 8, true>(here, weights, 0, 1, values + d, step, to + d, 0);
                for (; d < sizes.value_row; d += LANES)
                    product_in_registers<1, 1, true>(here, weights, 0, 1, values + d, step, to + d, 0);
            }
        }
    }
};

// The middle of attention alone, between products that others make: some queries' scores in 16 bits become their
// composed weights in place.
template <int R>
void compose_block(const Call& call) {
    constexpr int C = CHANNELS<R>;
    constexpr int64_t TOGETHER = 2;
    const Sizes sizes(call, C, TOGETHER);
    const int64_t H = sizes.heads, first_tile = call.first_key / TILE,
                  tiles = (call.last_key + TILE - 1) / TILE - first_tile;
    Memory packed(sizes.batch * tiles * 2 * sizes.factors_of_tile);
    float* key_factors = packed.start;  // [batch][tile][pre, post][head][factor][TILE]
    in_turn(call, sizes.batch * tiles, [&](int64_t, int64_t i) {
        for (int64_t h = 0; h < H; h++) {
            const int64_t b = i / tiles, first = (first_tile + i % tiles) * TILE;
            float* to = key_factors + i * 2 * sizes.factors_of_tile + h * C * TILE;
            if (sizes.pre) read_key_factors(call, call.pre, R, b, h, first, to);
            if (sizes.post) read_key_factors(call, call.post, R, b, h, first, to + sizes.factors_of_tile);
        }
    });
    const int64_t groups = (call.last_query - call.first_query + TOGETHER - 1) / TOGETHER;
    int64_t next = 0;
    in_parallel(call, least(call.threads, sizes.batch * groups), [&](int64_t) {
        const int64_t tile_floats = TOGETHER * H * TILE;
        Memory memory(tiles * (tile_floats + TOGETHER * H) + TOGETHER * H * (2 * C + 2) + TOGETHER * TILE +
                      4 * H * LANES);
        float* scores = memory.take(tiles * tile_floats);
        float* at_tiles = memory.take(tiles * TOGETHER * H);
        float *pre = memory.take(TOGETHER * H * C), *post = memory.take(TOGETHER * H * C);
        const Softmax softmax{H, memory.take(TOGETHER * H), memory.take(TOGETHER * H)};
        const Mask mask{memory.take(TOGETHER * TILE)};
        float* scratch = memory.take(4 * H * LANES);
        bool* seen = (bool*)alloca(tiles);
        for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < sizes.batch * groups;) {
            const int64_t b = i / groups, start = call.first_query + i % groups * TOGETHER;
            const int64_t queries = least(TOGETHER, call.last_query - start);
            if (sizes.pre) read_query_factors(call, call.pre, R, b, start, queries, queries, pre);
            if (sizes.post) read_query_factors(call, call.post, R, b, start, queries, queries, post);
            softmax.begin(queries);
            for (int64_t j = 0; j < tiles; j++) {
                const int64_t first = (first_tile + j) * TILE;
                const int64_t from = most(first, call.first_key), to = least(first + TILE, call.last_key);
                const Sight sight = mask.look(call, b, start, queries, first);
                seen[j] = sight != NOTHING;
                if (!seen[j]) continue;
                float *tile = scores + j * tile_floats, *at_tile = at_tiles + j * TOGETHER * H;
                if (to - from < TILE) memset(tile, 0, tile_floats * 4);
                for (int64_t k = 0; k < queries * H; k++)
                    read_row(call.scores, offset_of(call.scores, b, k % H, start + k / H) + from, 1, to - from,
                             call.scaling, tile + k * TILE + from - first);
                if (sizes.pre)
                    compose<R, false>(tile, tile, queries, heads_of(call, call.pre), pre,
                                      key_factors + (b * tiles + j) * 2 * sizes.factors_of_tile, nullptr, scratch);
                for (int64_t t = 0; t < queries; t++) {
                    if (sight == SOME)
                        for (int64_t h = 0; h < H; h++) apply_mask(tile + (t * H + h) * TILE, mask.added + t * TILE);
                    softmax.add_tile(t, tile + t * H * TILE, at_tile + t * H);
                }
            }
            for (int64_t j = 0; j < tiles; j++) {
                const int64_t first = (first_tile + j) * TILE;
                const int64_t from = most(first, call.first_key), to = least(first + TILE, call.last_key);
                float *tile = scores + j * tile_floats, *at_tile = at_tiles + j * TOGETHER * H;
                if (seen[j]) {
                    for (int64_t t = 0; t < queries; t++) softmax.scales(t, at_tile + t * H);
                    if (sizes.post)
                        compose<R, true>(tile, tile, queries, heads_of(call, call.post), post,
                                         key_factors + ((b * tiles + j) * 2 + 1) * sizes.factors_of_tile, at_tile,
                                         scratch);
                    else scale_tile(tile, queries, H, at_tile);
                } else {
                    memset(tile, 0, tile_floats * 4);
                }
                for (int64_t k = 0; k < queries * H; k++)
                    write_row(call.scores, offset_of(call.scores, b, k % H, start + k / H) + from,
                              tile + k * TILE + from - first, to - from, 1.0f);
            }
        }
    });
}

// What the queries that one thread works on add to the gradients of the keys, of one row of the batch, and of the
// static maps, of all rows.
struct Gradients {
    Memory memory;
    float *keys, *values;  // [key head][key][channels]
    float *pre, *post;     // [tile][head][factor][TILE]
    float *pre_static, *post_static;
    int64_t floats_of_row;

    static int64_t floats(const Sizes& sizes) {
        return sizes.tiles * (TILE * sizes.key_heads * (sizes.key_row + sizes.value_row) +
                              (sizes.pre + sizes.post) * sizes.factors_of_tile) +
               2 * sizes.heads * sizes.heads;
    }
    Gradients(const Call& call, const Sizes& sizes) : memory(floats(sizes)) {
        keys = memory.take(sizes.tiles * TILE * sizes.key_heads * sizes.key_row);
        values = memory.take(sizes.tiles * TILE * sizes.key_heads * sizes.value_row);
        pre = memory.take(sizes.pre * sizes.tiles * sizes.factors_of_tile);
        post = memory.take(sizes.post * sizes.tiles * sizes.factors_of_tile);
        floats_of_row = memory.next - memory.start;
        pre_static = memory.take(sizes.heads * sizes.heads / call.pre.groups);
        post_static = memory.take(sizes.heads * sizes.heads / call.post.groups);
        memset(pre_static, 0, (memory.next - pre_static) * 4);
    }
    void begin_row() { memset(keys, 0, floats_of_row * 4); }
};

template <int R>
struct Backward {
    static constexpr int C = CHANNELS<R>;
    const Call& call;
    const Sizes sizes;
    const Packed<R> packed;

    explicit Backward(const Call& c) : call(c), sizes(c, C, BLOCK), packed(c, sizes, true) {}

    // Threads take rows of the batch where there are enough of them, else blocks of queries, always the same ones.
    void run() const {
        const bool by_rows = sizes.batch >= call.threads;
        const int64_t affordable = most(1, (1LL << 28) / Gradients::floats(sizes));  // a gigabyte in all
        const int64_t workers = least(affordable, by_rows ? call.threads : least(call.threads, sizes.blocks));
        Gradients** gradients = (Gradients**)alloca(workers * sizeof(Gradients*));
        for (int64_t w = 0; w < workers; w++) gradients[w] = new Gradients(call, sizes);
        if (by_rows) {
            in_parallel(call, workers, [&](int64_t w) {
                Memory memory(floats_of_block());
                for (int64_t b = w; b < sizes.batch; b += workers) {
                    gradients[w]->begin_row();
                    for (int64_t number = 0; number < sizes.blocks; number++) block(b, number, *gradients[w], memory);
                    for (int64_t j = 0; j < sizes.tiles; j++) write_tile(b, j, gradients + w, 1);
                }
            });
        } else {
            for (int64_t b = 0; b < sizes.batch; b++) {
                in_parallel(call, workers, [&](int64_t w) {
                    Memory memory(floats_of_block());
                    gradients[w]->begin_row();
                    for (int64_t number = 0; number < sizes.blocks; number++) {  // a cheap and a costly one in turn
                        const int64_t place = number % (2 * workers);
                        if (place == w || place == 2 * workers - 1 - w) block(b, number, *gradients[w], memory);
                    }
                });
                in_turn(call, sizes.tiles, [&](int64_t, int64_t j) { write_tile(b, j, gradients, workers); });
            }
        }
        for (int64_t w = 0; w < workers; w++) {
            add_static(call.pre, gradients[w]->pre_static);
            add_static(call.post, gradients[w]->post_static);
            delete gradients[w];
        }
    }

    void add_static(const Stage& stage, const float* found) const {
        if (stage.static_map.type == NONE) return;
        for (int64_t i = 0; i < sizes.heads * sizes.heads / stage.groups; i++)
            ((float*)stage.static_gradient.data)[i] += found[i];
    }

    int64_t floats_of_block() const {
        const int64_t rows = sizes.rows, H = sizes.heads;
        return (sizes.tiles_in_sight * 3 + 1) * sizes.tile +
               rows * H * (2 * sizes.key_row + sizes.value_row + 2 + 4 * C) + rows * TILE + H * LANES * 4 +
               (4 * R + H) * TILE;
    }

    void block(int64_t b, int64_t number, Gradients& gradients, Memory& memory) const {
        const int64_t rows = sizes.rows, H = sizes.heads, start = number * rows;
        const int64_t queries = least(rows, sizes.queries - start), row = H * TILE;
        const int64_t key_row = sizes.key_row, value_row = sizes.value_row;
        memory.next = memory.start;
        float* query = memory.take(H * rows * key_row);
        float* query_gradient = memory.take(H * rows * key_row);
        float* output_gradient = memory.take(H * rows * value_row);
        float *pre = memory.take(rows * H * C), *post = memory.take(rows * H * C);
        float *pre_gradient = memory.take(rows * H * C), *post_gradient = memory.take(rows * H * C);
        float *log_sums = memory.take(rows * H), *along_row = memory.take(rows * H);
        float *scratch = memory.take(H * LANES * 4), *sums = memory.take((4 * R + H) * TILE);
        const Mask mask{memory.take(rows * TILE)};
        float* composed = memory.take(sizes.tile);
        for (int64_t h = 0; h < H; h++) {
            read_rows(call.query, b, h, start, queries, rows, sizes.channels, key_row, call.scaling,
                      query + h * rows * key_row);
            read_rows(call.output_gradient, b, h, start, queries, rows, sizes.value_channels, value_row, 1.0f,
                      output_gradient + h * rows * value_row);
            for (int64_t t = 0; t < queries; t++)
                log_sums[t * H + h] = ((float*)call.log_sums.data)[offset_of(call.log_sums, b, h, start + t)];
        }
        if (sizes.pre) read_query_factors(call, call.pre, R, b, start, queries, rows, pre);
        if (sizes.post) read_query_factors(call, call.post, R, b, start, queries, rows, post);
        memset(query_gradient, 0, H * rows * key_row * 4);
        memset(pre_gradient, 0, rows * H * C * 4);
        memset(post_gradient, 0, rows * H * C * 4);
        memset(along_row, 0, rows * H * 4);

        int64_t used = 0;
        int64_t* seen = (int64_t*)alloca(sizes.tiles * sizeof(int64_t));
        float* tiles =
            memory.take(0);  // of every tile in sight: weights, their gradient, and scores if they are composed
        const int64_t floats = sizes.tile * (sizes.pre ? 3 : 2);
        for (int64_t j = 0; j < sizes.tiles; j++) {
            const Sight sight = mask.look(call, b, start, queries, j * TILE);
            if (sight == NOTHING) continue;
            const int64_t i = b * sizes.tiles + j;
            float *weights = tiles + used * floats, *gradient = weights + sizes.tile;
            float* scores = sizes.pre ? gradient + sizes.tile : weights;
            for (int64_t h = 0; h < H; h++) {
                const int64_t key_head = i * sizes.key_heads + h / sizes.served;
                product<false>(rows, TILE, sizes.channels, query + h * rows * key_row, key_row, 1,
                               packed.key_columns + key_head * sizes.channels * TILE, sizes.channels * PANEL, PANEL,
                               scores + h * TILE, row);
                product<false>(rows, TILE, sizes.value_channels, output_gradient + h * rows * value_row, value_row, 1,
                               packed.value_columns + key_head * sizes.value_channels * TILE,
                               sizes.value_channels * PANEL, PANEL, gradient + h * TILE, row);
            }
            if (sizes.pre)
                compose<R, false>(scores, weights, queries, heads_of(call, call.pre), pre,
                                  packed.pre + i * sizes.factors_of_tile, nullptr, scratch);
            for (int64_t t = 0; t < queries; t++)
                for (int64_t h = 0; h < H; h++) {
                    float* x = weights + t * row + h * TILE;
                    if (sight == SOME) apply_mask(x, mask.added + t * TILE);
                    for (int s = 0; s < TILE; s += LANES) store(x + s, exponential(load(x + s) - log_sums[t * H + h]));
                }
            if (sizes.post)
                compose<R, false>(weights, composed, queries, heads_of(call, call.post), post,
                                  packed.post + i * sizes.factors_of_tile, nullptr, scratch);
            for (int64_t h = 0; h < H; h++)
                product<true>(TILE, value_row, queries, (sizes.post ? composed : weights) + h * TILE, 1, row,
                              output_gradient + h * rows * value_row, PANEL, value_row,
                              gradients.values + (h / sizes.served * sizes.tiles + j) * TILE * value_row, value_row);
            if (sizes.post)
                compose_backward<R>(weights, gradient, queries, heads_of(call, call.post), post,
                                    packed.post + i * sizes.factors_of_tile, post_gradient,
                                    gradients.post + j * sizes.factors_of_tile, gradients.post_static, sums);
            for (int64_t k = 0; k < queries * H; k++) {
                Vector sum{};
                for (int s = 0; s < TILE; s += LANES)
                    sum += load(weights + k * TILE + s) * load(gradient + k * TILE + s);
                along_row[k] += sum_of(sum);
            }
            seen[used++] = j;
        }
        while (used-- > 0) {
            const int64_t j = seen[used], i = b * sizes.tiles + j;
            float *weights = tiles + used * floats, *gradient = weights + sizes.tile;
            for (int64_t k = 0; k < queries * H; k++)
                for (int s = 0; s < TILE; s += LANES) {
                    float* d = gradient + k * TILE + s;
                    store(d, load(weights + k * TILE + s) * (load(d) - along_row[k]));
                }
            if (sizes.pre)
                compose_backward<R>(gradient + sizes.tile, gradient, queries, heads_of(call, call.pre), pre,
                                    packed.pre + i * sizes.factors_of_tile, pre_gradient,
                                    gradients.pre + j * sizes.factors_of_tile, gradients.pre_static, sums);
            for (int64_t h = 0; h < H; h++) {
                const int64_t key_head = h / sizes.served;
                product<true>(rows, key_row, TILE, gradient + h * TILE, row, 1,
                              packed.key_rows + (i * sizes.key_heads + key_head) * key_row * TILE, PANEL, key_row,
                              query_gradient + h * rows * key_row, key_row);
                product<true>(TILE, key_row, queries, gradient + h * TILE, 1, row, query + h * rows * key_row, PANEL,
                              key_row, gradients.keys + (key_head * sizes.tiles + j) * TILE * key_row, key_row);
            }
        }
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < queries; t++) {
                write_row(call.query_gradient, offset_of(call.query_gradient, b, h, start + t),
                          query_gradient + (h * rows + t) * key_row, sizes.channels, call.scaling);
                write_query_factors(call.pre, b, h, start + t, pre_gradient + (t * H + h) * C);
                write_query_factors(call.post, b, h, start + t, post_gradient + (t * H + h) * C);
            }
    }

    void write_query_factors(const Stage& stage, int64_t b, int64_t h, int64_t t, const float* found) const {
        if (stage.query.type == NONE) return;
        float* to = (float*)stage.query_gradient.data + offset_of(stage.query_gradient, b, h, t);
        for (int64_t c = 0; c < stage.query_channels; c++)
            to[c * stage.query_gradient.strides[3]] = found[place(c, stage.query_channels, R)];
    }

    // The gradients of one tile's keys, values and factors: the sums of what the workers found.
    void write_tile(int64_t b, int64_t j, Gradients** gradients, int64_t workers) const {
        for (int64_t w = 1; w < workers; w++) {
            for (int64_t h = 0; h < sizes.key_heads; h++) {
                const int64_t tile = (h * sizes.tiles + j) * TILE;
                add(gradients[0]->keys + tile * sizes.key_row, gradients[w]->keys + tile * sizes.key_row,
                    TILE * sizes.key_row);
                add(gradients[0]->values + tile * sizes.value_row, gradients[w]->values + tile * sizes.value_row,
                    TILE * sizes.value_row);
            }
            const int64_t at = j * sizes.factors_of_tile;
            if (sizes.pre) add(gradients[0]->pre + at, gradients[w]->pre + at, sizes.factors_of_tile);
            if (sizes.post) add(gradients[0]->post + at, gradients[w]->post + at, sizes.factors_of_tile);
        }
        const int64_t first = j * TILE, here = least(TILE, call.keys - first);
        for (int64_t h = 0; h < sizes.key_heads; h++)
            for (int64_t s = 0; s < here; s++) {
                const int64_t at = (h * sizes.tiles + j) * TILE + s;
                write_row(call.key_gradient, offset_of(call.key_gradient, b, h, first + s),
                          gradients[0]->keys + at * sizes.key_row, sizes.channels, 1.0f);
                write_row(call.value_gradient, offset_of(call.value_gradient, b, h, first + s),
                          gradients[0]->values + at * sizes.value_row, sizes.value_channels, 1.0f);
            }
        write_key_factors(call.pre, b, first, here, gradients[0]->pre + j * sizes.factors_of_tile);
        write_key_factors(call.post, b, first, here, gradients[0]->post + j * sizes.factors_of_tile);
    }

    static void add(float* to, const float* more, int64_t number) {
        for (int64_t i = 0; i < number; i++) to[i] += more[i];
    }

    void write_key_factors(const Stage& stage, int64_t b, int64_t first, int64_t here, const float* found) const {
        if (stage.key.type == NONE) return;
        const View& view = stage.key_gradient;
        for (int64_t h = 0; h < sizes.heads; h++)
            for (int64_t c = 0; c < stage.key_channels; c++) {
                const float* from = found + (h * C + place(c, stage.key_channels, R)) * TILE;
                float* to = (float*)view.data + offset_of(view, b, h, first) + c * view.strides[3];
                for (int64_t s = 0; s < here; s++) to[s * view.strides[2]] = from[s];
            }
    }
};

template <class F>
int by_rank(int64_t rank, F&& run) {
    if (rank <= 2) run(std::integral_constant<int, 2>());
    else if (rank <= 4) run(std::integral_constant<int, 4>());
    else if (rank <= 8) run(std::integral_constant<int, 8>());
    else return 1;
    return 0;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int dcformer_forward(const Call* call) {
    return by_rank(call->rank, [&](auto rank) {
        if (call->queries <= FEW && call->log_sums.type == NONE) FewQueries<decltype(rank)::value>(*call).run();
        else Forward<decltype(rank)::value>(*call).run();
    });
}

EXPORTED int dcformer_backward(const Call* call) {
    return by_rank(call->rank, [&](auto rank) { Backward<decltype(rank)::value>(*call).run(); });
}

EXPORTED int dcformer_compose_block(const Call* call) {
    return by_rank(call->rank, [&](auto rank) { compose_block<decltype(rank)::value>(*call); });
}

EXPORTED int dcformer_project(const ProjectionCall* call) {
    project(*call);
    return 0;
}
