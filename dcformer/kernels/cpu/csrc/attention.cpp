// Composed attention for CPUs: scores, composition, softmax, composition and values on tiles that stay in the cache.
//
// A block of queries keeps its exponentials over all keys that it sees; nothing else is quadratic. A first sweep over
// tiles of keys makes scores, composes and masks them and takes e^(x - largest so far); a second one scales that by
// the sum of the whole row, composes it and multiplies it with the values. The backward pass computes both again.
#include <deque>
#include <type_traits>

#include "call.h"
#include "factors.h"

namespace {

constexpr int64_t BLOCK = 48;  // queries: a multiple of ROWS that makes enough of every key that is read
static_assert(BLOCK % ROWS == 0, "blocks hold whole blocks of rows");
constexpr int64_t FEW = 8;   // queries that do not pay for laying keys and values out
constexpr int64_t PAIR = 2;  // queries of a block if the scores are given

// A call, divided into blocks of queries and tiles of keys.
struct Plan : Call {
    const int64_t R;  // the rank, padded
    const int64_t queries = last_query - first_query, first_tile = first_key / TILE;
    const int64_t tiles = (last_key + TILE - 1) / TILE - first_tile;
    const int64_t channels = query.channels, value_channels = value.channels;
    const int64_t key_row = rounded_up(channels, LANES), value_row = rounded_up(value_channels, LANES);
    const int64_t heads_per_key = heads / key_heads;  // that share a key/value head
    const int64_t row_factors = heads * (2 * R + 1);  // floats of one query's factors, and of one tile's, if it has any
    const int64_t pre_factors = composes(pre) * row_factors * TILE, post_factors = composes(post) * row_factors * TILE;
    int64_t tiles_in_sight = tiles;  // of one block, at most
    int64_t rows, blocks, tile;      // queries of a block, blocks, and floats of the scores of a block and a tile

    Plan(const Call& call, int64_t padded_rank, int64_t most_rows) : Call(call), R(padded_rank) {
        if (sliding_window) tiles_in_sight = least(tiles, (2 * sliding_window + most_rows) / TILE + 2);
        // All scores of a block are in memory at once, in 64 MB where the block can be that small.
        const int64_t affordable = (1 << 24) / (heads * tiles_in_sight * TILE) / ROWS * ROWS;
        rows = least(least(most_rows, rounded_up(queries, ROWS)), most(affordable, least(most_rows, ROWS)));
        blocks = (queries + rows - 1) / rows;
        tile = rows * heads * TILE;
    }

    int64_t first_of(int64_t j) const { return (first_tile + j) * TILE; }  // key of tile j
    // Tile j of the keys of query head h, among the tiles of all key/value heads.
    int64_t key_tile(int64_t b, int64_t j, int64_t h) const { return (b * tiles + j) * key_heads + h / heads_per_key; }
};

// Keys and values, as one of the passes reads them, and factors of all tiles in float32: rows of channels, or columns
// of them as `read_columns` lays them out.
struct Packed {
    const Plan& plan;
    const bool forward, backward;
    const int64_t tiles = plan.batch * plan.tiles, keys = tiles * plan.key_heads * TILE;
    const Floats key_columns{(forward || backward) * keys * plan.channels}, key_rows{backward * keys * plan.key_row};
    const Floats value_columns{backward * keys * plan.value_channels}, value_rows{forward * keys * plan.value_row};
    const Floats pre{tiles * plan.pre_factors}, post{tiles * plan.post_factors};

    Packed(const Plan& p, bool is_forward, bool is_backward) : plan(p), forward(is_forward), backward(is_backward) {
        parallel_on_demand(plan.threads, tiles, [&](auto next) {
            for (int64_t i; next(i);) pack(i, i / plan.tiles, plan.first_of(i % plan.tiles));
        });
    }

    void pack(int64_t i, int64_t b, int64_t first) const {
        const int64_t number = least(TILE, plan.last_key - first), columns = plan.value_channels;
        const int64_t D = plan.channels, K = plan.key_row, V = plan.value_row;
        for (int64_t h = 0, at = i * plan.key_heads; h < plan.key_heads; h++, at++) {
            if (forward || backward) read_columns(plan.key, b, h, first, number, D, key_columns.part(at, TILE * D));
            if (backward) {
                read_rows(plan.key, b, h, first, number, TILE, D, K, 1.0f, key_rows.part(at, TILE * K));
                read_columns(plan.value, b, h, first, number, columns, value_columns.part(at, TILE * columns));
            }
            if (forward)
                read_rows(plan.value, b, h, first, number, TILE, columns, V, 1.0f, value_rows.part(at, TILE * V));
        }
        read_key_factors(plan, plan.pre, plan.R, b, first, pre.part(i, plan.pre_factors));
        read_key_factors(plan, plan.post, plan.R, b, first, post.part(i, plan.post_factors));
    }
};

// The softmax of some queries, tile by tile: largest score and sum of exponentials so far, [query][head] each.
struct Softmax {
    int64_t heads;
    float *largest, *sums;

    void begin(int64_t queries) const {
        for (int64_t i = 0; i < queries * heads; i++) largest[i] = LOWEST, sums[i] = 0.0f;
    }

    // One query's scores [head][TILE] become e^(score - largest so far), which is stored in `at_tile` [head].
    void add_tile(int64_t query, float* scores, float* at_tile) const {
        float *query_largest = largest + query * heads, *query_sums = sums + query * heads;
        for (int64_t h = 0; h < heads; h++) {
            float* x = scores + h * TILE;
            Vector top = load(x);
            for (int s = LANES; s < TILE; s += LANES) top = larger(load(x + s), top);
            const float now = largest_of(top), before = query_largest[h];
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
            if (top != query_largest[h]) query_sums[h] *= expf(query_largest[h] - top);
            query_sums[h] += sum_of(sum);
            query_largest[h] = top;
        }
    }

    // `at_tile` [head] becomes the factors that turn the exponentials of a tile into weights.
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

inline void add(float* to, const float* more, int64_t number) {
    for (int64_t i = 0; i < number; i++) to[i] += more[i];
}

// Some queries of one row of the batch: their factors, the keys that they see, and the composition of their tiles.
template <int R>
struct Queries {
    const Plan& plan;
    const int64_t most, H = plan.heads;
    const Floats pre{most * plan.row_factors}, post{most * plan.row_factors}, added{most * TILE},
        scratch{4 * H * LANES};
    int64_t b = -1, start = 0, number = 0;

    Queries(const Plan& p, int64_t most_queries) : plan(p), most(most_queries) {}

    void begin(int64_t row, int64_t first, int64_t queries) {
        b = row, start = first, number = queries;
        read_query_factors(plan, plan.pre, R, b, start, number, pre.part(0, number * plan.row_factors));
        read_query_factors(plan, plan.post, R, b, start, number, post.part(0, number * plan.row_factors));
    }

    Visible visible(int64_t first) const {
        return visible_keys(plan, b, start, number, first, added.part(0, number * TILE));
    }

    template <bool SCALED>
    void compose_tile(const Stage& stage, const Floats& factors, const float* in, float* out, const float* key_factors,
                      const float* scale = nullptr) const {
        compose<R, SCALED>(in, out, number, heads_of(plan, stage), factors.part(0, number * plan.row_factors),
                           key_factors, scale, scratch.part(0, 4 * H * LANES));
    }

    // Scores are composed and masked; `use` gets those of every query, [head][TILE].
    template <class Use>
    void compose_scores(const float* in, float* out, const float* key_factors, Visible visible, const Use& use) const {
        if (plan.pre_factors) compose_tile<false>(plan.pre, pre, in, out, key_factors);
        for (int64_t t = 0; t < number; t++) {
            float* scores = out + t * H * TILE;
            if (visible == SOME)
                for (int64_t h = 0; h < H; h++) apply_mask(scores + h * TILE, added.part(t, TILE));
            use(t, scores);
        }
    }

    // Scores become exponentials, relative to the largest so far, which `at_tile` keeps.
    void to_exponentials(float* tile, const float* key_factors, Visible visible, const Softmax& softmax,
                         float* at_tile) const {
        compose_scores(tile, tile, key_factors, visible,
                       [&](int64_t t, float* scores) { softmax.add_tile(t, scores, at_tile + t * H); });
    }

    // Exponentials become weights, which are composed.
    void to_weights(float* tile, const float* key_factors, const Softmax& softmax, float* at_tile) const {
        for (int64_t t = 0; t < number; t++) softmax.scales(t, at_tile + t * H);
        if (plan.post_factors) compose_tile<true>(plan.post, post, tile, tile, key_factors, at_tile);
        else scale_tile(tile, number, H, at_tile);
    }
};

// All queries, block by block. If the call has `scores`, which are made and multiplied with the values elsewhere, these
// become their composed weights.
template <int R>
struct Forward {
    const Plan plan;
    const bool has_scores = plan.scores.type != NONE;
    const Packed packed{plan, !has_scores, false};

    explicit Forward(const Call& call) : plan(call, R, call.scores.type == NONE ? BLOCK : PAIR) {}

    void run() const {
        parallel_on_demand(plan.threads, plan.batch * plan.blocks, [&](auto next) {
            Worker worker(*this);
            for (int64_t i; next(i);) worker.block(i % plan.batch, plan.blocks - 1 - i / plan.batch);
        });
    }

    struct Worker {
        const Plan& plan;
        const Packed& packed;
        const bool has_scores;
        const int64_t H = plan.heads, rows = plan.rows, D = plan.channels, V = plan.value_row;
        Queries<R> queries{plan, rows};
        const Floats query{H * rows * D * !has_scores}, output{H * rows * V * !has_scores};
        const Floats tiles{plan.tiles_in_sight * plan.tile}, blank{has_scores * plan.tile},
            at_tiles{plan.tiles_in_sight * rows * H};
        const Floats largest{rows * H}, sums{rows * H};
        const Array<int64_t> seen{plan.tiles_in_sight};  // tiles of which something is visible

        explicit Worker(const Forward& all) : plan(all.plan), packed(all.packed), has_scores(all.has_scores) {
            blank.zeros(0, has_scores * plan.tile);
        }

        void block(int64_t b, int64_t number) {
            const int64_t start = plan.first_query + number * rows;
            const Softmax softmax{H, largest.part(0, rows * H), sums.part(0, rows * H)};
            softmax.begin(rows);
            queries.begin(b, start, least(rows, plan.last_query - start));
            for (int64_t h = 0; h < H * !has_scores; h++) {
                read_rows(plan.query, b, h, start, queries.number, rows, D, D, plan.scaling, query.part(h, rows * D));
                output.zeros(h, rows * V);
            }
            int64_t used = 0;
            for (int64_t j = 0; j < plan.tiles; j++) {
                const Visible visible = queries.visible(plan.first_of(j));
                if (visible != NOTHING) {
                    float* tile = tiles.part(used, plan.tile);
                    if (has_scores) read_scores(j, tile);
                    for (int64_t h = 0; h < H * !has_scores; h++)
                        product<false>(rows, TILE, D, query.part(h, rows * D), D, 1,
                                       packed.key_columns.part(plan.key_tile(b, j, h), TILE * D), D * PANEL, PANEL,
                                       tile + h * TILE, H * TILE);
                    queries.to_exponentials(tile, packed.pre.part(b * plan.tiles + j, plan.pre_factors), visible,
                                            softmax, at_tiles.part(used, rows * H));
                    *seen.part(used++, 1) = j;
                } else if (has_scores) {
                    write_scores(j, blank.part(0, plan.tile));
                }
            }
            while (used-- > 0) {  // the last tile is still in the cache
                const int64_t j = *seen.part(used, 1);
                float* tile = tiles.part(used, plan.tile);
                queries.to_weights(tile, packed.post.part(b * plan.tiles + j, plan.post_factors), softmax,
                                   at_tiles.part(used, rows * H));
                if (has_scores) write_scores(j, tile);
                for (int64_t h = 0; h < H * !has_scores; h++)
                    product<true>(rows, V, TILE, tile + h * TILE, H * TILE, 1,
                                  packed.value_rows.part(plan.key_tile(b, j, h), TILE * V), PANEL, V,
                                  output.part(h, rows * V), V);
            }
            for (int64_t h = 0; h < H * !has_scores; h++)
                for (int64_t t = 0; t < queries.number; t++) {
                    write_row(plan.output, offset_of(plan.output, b, h, start + t), output.part(h * rows + t, V),
                              plan.value_channels, 1.0f);
                    if (plan.log_sums.type == NONE) continue;
                    const float sum = softmax.sums[t * H + h];
                    ((float*)plan.log_sums.data)[(b * H + h) * plan.queries + start + t] =
                        sum == 0.0f ? INFINITY : softmax.largest[t * H + h] + logf(sum);
                }
        }

        // For every query and head `work` gets its index, and of the scores in tile j the first and how many they are,
        // and their offset among those of the call.
        template <class Work>
        void for_scores(int64_t j, const Work& work) const {
            const int64_t first = plan.first_of(j), from = most(first, plan.first_key);
            const int64_t number = least(first + TILE, plan.last_key) - from;
            for (int64_t k = 0; k < queries.number * H; k++) {
                const int64_t query = queries.start + k / H - plan.first_query;
                work(k, from - first, number, offset_of(plan.scores, queries.b, k % H, query) + from - plan.first_key);
            }
        }

        void read_scores(int64_t j, float* tile) const {
            for_scores(j, [&](int64_t k, int64_t first, int64_t number, int64_t at) {
                if (number < TILE) memset(tile + k * TILE, 0, TILE * 4);
                read_row(plan.scores, at, 1, number, plan.scaling, tile + k * TILE + first);
            });
        }

        void write_scores(int64_t j, const float* tile) const {
            for_scores(j, [&](int64_t k, int64_t first, int64_t number, int64_t at) {
                write_row(plan.scores, at, tile + k * TILE + first, number, 1.0f);
            });
        }
    };
};

// A few queries, as in decoding: keys and values are read once, from where they are, and are not laid out anew.
template <int R>
struct FewQueries {
    const Plan plan;
    const int64_t rows = plan.queries * plan.heads, V = plan.value_row;

    explicit FewQueries(const Call& call) : plan(call, R, call.last_query) {}

    void run() const {
        const Array<int64_t> seen(plan.batch * plan.tiles);  // tiles of which something is visible
        const Floats added(plan.queries * TILE);
        int64_t used = 0;
        for (int64_t i = 0; i < plan.batch * plan.tiles; i++)
            if (visible_keys(plan, i / plan.tiles, 0, plan.queries, i % plan.tiles * TILE,
                             added.part(0, plan.queries * TILE)) != NOTHING)
                *seen.part(used++, 1) = i;
        const int64_t threads = most(1, least(plan.threads.number, used)), all = plan.batch * rows;
        const Floats tiles(used * rows * TILE), at_tiles(used * rows), tile_sums(used * rows);
        const Floats largest(all), sums(all), outputs(threads * all * V);
        std::deque<Worker> workers;
        for (int64_t w = 0; w < threads; w++) workers.emplace_back(plan);
        const auto for_tiles = [&](const auto& work) {
            parallel_for(plan.threads, threads, [&](int64_t w) {
                for (int64_t i = w * used / threads; i < (w + 1) * used / threads; i++) {
                    workers[w].begin(*seen.part(i, 1));
                    work(w, i);
                }
            });
        };
        for_tiles([&](int64_t w, int64_t i) {
            const Softmax softmax{plan.heads, at_tiles.part(i, rows), tile_sums.part(i, rows)};
            workers[w].score(tiles.part(i, rows * TILE), softmax);
        });
        Softmax{1, largest.part(0, all), sums.part(0, all)}.begin(all);
        for (int64_t i = 0; i < used; i++) {
            const float* at_tile = at_tiles.part(i, rows);
            float* total = largest.part(*seen.part(i, 1) / plan.tiles, rows);
            for (int64_t k = 0; k < rows; k++) total[k] = at_tile[k] > total[k] ? at_tile[k] : total[k];
        }
        for (int64_t i = 0; i < used; i++) {
            const int64_t b = *seen.part(i, 1) / plan.tiles;
            const float *at_tile = at_tiles.part(i, rows), *sum = tile_sums.part(i, rows), *top = largest.part(b, rows);
            float* total = sums.part(b, rows);
            for (int64_t k = 0; k < rows; k++) total[k] += sum[k] * expf(at_tile[k] - top[k]);
        }
        outputs.zeros(0, threads * all * V);
        for_tiles([&](int64_t w, int64_t i) {
            const int64_t b = *seen.part(i, 1) / plan.tiles;
            const Softmax softmax{plan.heads, largest.part(b, rows), sums.part(b, rows)};
            workers[w].add_values(tiles.part(i, rows * TILE), softmax, at_tiles.part(i, rows),
                                  outputs.part(w * plan.batch + b, rows * V));
        });
        for (int64_t w = 1; w < threads; w++) add(outputs.part(0, all * V), outputs.part(w, all * V), all * V);
        for (int64_t i = 0; i < all; i++)
            write_row(plan.output, offset_of(plan.output, i / rows, i % plan.heads, i % rows / plan.heads),
                      outputs.part(i, V), plan.value_channels, 1.0f);
    }

    struct Worker {
        const Plan& plan;
        const int64_t H = plan.heads, rows = plan.queries * H, D = plan.channels, V = plan.value_row;
        Queries<R> queries{plan, plan.queries};
        const Floats query{rows * D}, factors{plan.row_factors * TILE}, copies{TILE * most(D, V)};
        int64_t first = 0, number = 0;  // key of the tile, and its keys

        explicit Worker(const Plan& p) : plan(p) {}

        void begin(int64_t tile) {
            first = tile % plan.tiles * TILE, number = least(TILE, plan.last_key - first);
            if (queries.b == tile / plan.tiles) return;
            queries.begin(tile / plan.tiles, 0, plan.queries);
            for (int64_t k = 0; k < rows; k++)
                read_row(plan.query, offset_of(plan.query, queries.b, k % H, k / H), 1, D, plan.scaling,
                         query.part(k, D));
        }

        void score(float* tile, const Softmax& softmax) const {
            for (int64_t h = 0; h < H; h++) {
                const Rows keys = rows_of(plan.key, h, D, D);
                for (int64_t k = h; k < rows; k += H) {
                    multiply_rows(keys.start, keys.step, query.part(k, D), D, number, tile + k * TILE);
                    for (int64_t s = number; s < TILE; s++) tile[k * TILE + s] = 0.0f;
                }
            }
            read_key_factors(plan, plan.pre, R, queries.b, first, factors.part(0, plan.row_factors * TILE));
            softmax.begin(plan.queries);
            queries.to_exponentials(tile, factors.part(0, plan.pre_factors), queries.visible(first), softmax,
                                    softmax.largest);
        }

        void add_values(float* tile, const Softmax& softmax, float* at_tile, float* output) const {
            read_key_factors(plan, plan.post, R, queries.b, first, factors.part(0, plan.row_factors * TILE));
            queries.to_weights(tile, factors.part(0, plan.post_factors), softmax, at_tile);
            for (int64_t h = 0; h < H; h++) {
                const Rows values = rows_of(plan.value, h, plan.value_channels, V);
                for (int64_t k = h; k < rows; k += H) {
                    const float *weights = tile + k * TILE, *from = values.start;
                    float* to = output + k * V;
                    int64_t d = 0;
                    for (; d + 8 * LANES <= V; d += 8 * LANES)
                        product_in_registers<1, 8, true>(number, weights, 0, 1, from + d, values.step, to + d, 0);
                    for (; d < V; d += LANES)
                        product_in_registers<1, 1, true>(number, weights, 0, 1, from + d, values.step, to + d, 0);
                }
            }
        }

        // The tile's keys or values of one head in float32: where they are if they fill whole vectors, else a copy.
        struct Rows {
            const float* start;
            int64_t step;
        };
        Rows rows_of(const View& view, int64_t h, int64_t channels, int64_t padded) const {
            const int64_t key_head = h / plan.heads_per_key;
            if (view.type == FLOAT32 && channels == padded)
                return {(const float*)view.data + offset_of(view, queries.b, key_head, first), view.strides[2]};
            float* to = copies.part(0, TILE * padded);
            if (h % plan.heads_per_key == 0)
                read_rows(view, queries.b, key_head, first, number, number, channels, padded, 1.0f, to);
            return {to, padded};
        }
    };
};

// What every thread's queries add to the gradients of keys, values and their factors in one row of the batch, and of
// the static maps in all.
struct Gradients {
    const Plan& plan;
    const int64_t threads, K = plan.tiles * TILE * plan.key_row, V = plan.tiles * TILE * plan.value_row;
    const int64_t map = plan.heads * plan.heads / plan.groups;
    const Floats keys{threads * plan.key_heads * K}, values{threads * plan.key_heads * V};
    const Floats pre{threads * plan.tiles * plan.pre_factors}, post{threads * plan.tiles * plan.post_factors};
    const Floats pre_static{threads * map}, post_static{threads * map};

    Gradients(const Plan& p, int64_t number) : plan(p), threads(number) {
        pre_static.zeros(0, threads * map), post_static.zeros(0, threads * map);
    }
    void begin_row(int64_t w) const {
        keys.zeros(w, plan.key_heads * K), values.zeros(w, plan.key_heads * V);
        pre.zeros(w, plan.tiles * plan.pre_factors), post.zeros(w, plan.tiles * plan.post_factors);
    }
};

template <int R>
struct Backward {
    static constexpr int C = CHANNELS<R>;
    const Plan plan;
    const Packed packed{plan, false, true};

    explicit Backward(const Call& call) : plan(call, R, BLOCK) {}

    // Threads take rows of the batch where there are enough of them, else blocks of queries, always the same ones.
    void run() const {
        const bool by_rows = plan.batch >= plan.threads.number;
        const int64_t items = by_rows ? plan.batch : plan.blocks, channels = plan.key_row + plan.value_row;
        const int64_t size = plan.tiles * (TILE * plan.key_heads * channels + plan.pre_factors + plan.post_factors);
        const int64_t affordable = most(1, (1LL << 28) / size);  // a gigabyte in all
        const int64_t threads = least(affordable, least(plan.threads.number, items));
        const Gradients gradients(plan, threads);
        if (by_rows) {
            parallel_for(plan.threads, threads, [&](int64_t w) {
                Worker worker(*this, gradients, w);
                for (int64_t b = w; b < plan.batch; b += threads) {
                    gradients.begin_row(w);
                    for (int64_t number = 0; number < plan.blocks; number++) worker.block(b, number);
                    for (int64_t j = 0; j < plan.tiles; j++) write_tile(b, j, gradients, w, 1);
                }
            });
        } else {
            for (int64_t b = 0; b < plan.batch; b++) {
                parallel_for(plan.threads, threads, [&](int64_t w) {
                    Worker worker(*this, gradients, w);
                    gradients.begin_row(w);
                    for (int64_t number = 0; number < plan.blocks; number++) {  // a cheap and a costly one in turn
                        const int64_t turn = number % (2 * threads);
                        if (turn == w || turn == 2 * threads - 1 - w) worker.block(b, number);
                    }
                });
                parallel_on_demand(plan.threads, plan.tiles, [&](auto next) {
                    for (int64_t j; next(j);) write_tile(b, j, gradients, 0, threads);
                });
            }
        }
        for (int64_t w = 0; w < threads; w++) {
            if (plan.pre.static_map.type != NONE)
                add((float*)plan.pre.static_gradient.data, gradients.pre_static.part(w, gradients.map), gradients.map);
            if (plan.post.static_map.type != NONE)
                add((float*)plan.post.static_gradient.data, gradients.post_static.part(w, gradients.map),
                    gradients.map);
        }
    }

    struct Worker {
        const Plan& plan;
        const Packed& packed;
        const Gradients& gradients;
        const int64_t w, H = plan.heads, rows = plan.rows, D = plan.channels, K = plan.key_row, V = plan.value_row;
        Queries<R> queries{plan, rows};
        const Floats query{H * rows * K}, query_gradient{H * rows * K}, output_gradient{H * rows * V};
        const Floats pre_gradient{rows * H * C}, post_gradient{rows * H * C}, log_sums{rows * H}, along_row{rows * H};
        const Floats sums{(4 * R + H) * TILE}, composed{composes(plan.post) * plan.tile};
        // Of every tile in sight: scores, weights, and the gradients of the weights, then of the scores.
        const Floats scores{composes(plan.pre) * plan.tiles_in_sight * plan.tile};
        const Floats weights{plan.tiles_in_sight * plan.tile}, changes{plan.tiles_in_sight * plan.tile};
        const Array<int64_t> seen{plan.tiles_in_sight};

        Worker(const Backward& all, const Gradients& sums_of_threads, int64_t number)
            : plan(all.plan), packed(all.packed), gradients(sums_of_threads), w(number) {}

        void block(int64_t b, int64_t number) {
            queries.begin(b, number * rows, least(rows, plan.queries - number * rows));
            const int64_t start = queries.start, count = queries.number;
            for (int64_t h = 0; h < H; h++) {
                read_rows(plan.query, b, h, start, count, rows, D, K, plan.scaling, query.part(h, rows * K));
                read_rows(plan.output_gradient, b, h, start, count, rows, plan.value_channels, V, 1.0f,
                          output_gradient.part(h, rows * V));
                for (int64_t t = 0; t < count; t++)
                    read_row(plan.log_sums, (b * H + h) * plan.queries + start + t, 1, 1, 1.0f,
                             log_sums.part(t * H + h, 1));
            }
            query_gradient.zeros(0, H * rows * K), along_row.zeros(0, rows * H);
            pre_gradient.zeros(0, rows * H * C), post_gradient.zeros(0, rows * H * C);
            int64_t used = 0;
            for (int64_t j = 0; j < plan.tiles; j++) {
                const Visible visible = queries.visible(plan.first_of(j));
                if (visible == NOTHING) continue;
                add_value_gradients(j, used, visible);
                *seen.part(used++, 1) = j;
            }
            while (used-- > 0) add_key_gradients(*seen.part(used, 1), used);
            for (int64_t h = 0; h < H; h++)
                for (int64_t t = 0; t < count; t++) {
                    const int64_t k = t * H + h, position = start + t;
                    write_row(plan.query_gradient, offset_of(plan.query_gradient, b, h, position),
                              query_gradient.part(h * rows + t, K), D, plan.scaling);
                    write_factors(plan.pre.query_gradient, R, b, h, position, 1, pre_gradient.part(k, C), 1);
                    write_factors(plan.post.query_gradient, R, b, h, position, 1, post_gradient.part(k, C), 1);
                }
        }

        // The first sweep: weights, their gradients, and what they add to those of the values and of post's factors.
        void add_value_gradients(int64_t j, int64_t used, Visible visible) const {
            const int64_t i = queries.b * plan.tiles + j, row = H * TILE, columns = plan.value_channels;
            float *weight = weights.part(used, plan.tile), *change = changes.part(used, plan.tile);
            float* score = plan.pre_factors ? scores.part(used, plan.tile) : weight;
            for (int64_t h = 0; h < H; h++) {
                const int64_t at = plan.key_tile(queries.b, j, h);
                product<false>(rows, TILE, D, query.part(h, rows * K), K, 1, packed.key_columns.part(at, TILE * D),
                               D * PANEL, PANEL, score + h * TILE, row);
                product<false>(rows, TILE, columns, output_gradient.part(h, rows * V), V, 1,
                               packed.value_columns.part(at, TILE * columns), columns * PANEL, PANEL, change + h * TILE,
                               row);
            }
            const auto to_weights = [&](int64_t t, float* x) {
                for (int64_t h = 0; h < H; h++, x += TILE) {
                    const float log_sum = *log_sums.part(t * H + h, 1);
                    for (int s = 0; s < TILE; s += LANES) store(x + s, exponential(load(x + s) - log_sum));
                }
            };
            queries.compose_scores(score, weight, packed.pre.part(i, plan.pre_factors), visible, to_weights);
            float* value_weight = plan.post_factors ? composed.part(0, plan.tile) : weight;
            if (plan.post_factors)
                queries.template compose_tile<false>(plan.post, queries.post, weight, value_weight,
                                                     packed.post.part(i, plan.post_factors));
            for (int64_t h = 0; h < H; h++)
                product<true>(TILE, V, queries.number, value_weight + h * TILE, 1, row,
                              output_gradient.part(h, rows * V), PANEL, V,
                              gradients.values.part(plan.key_tile(w, j, h), TILE * V), V);
            if (plan.post_factors)
                go_back(plan.post, weight, change, queries.post, packed.post.part(i, plan.post_factors), post_gradient,
                        gradients.post.part(w * plan.tiles + j, plan.post_factors), gradients.post_static);
            for (int64_t k = 0; k < queries.number * H; k++) {
                Vector sum{};
                for (int64_t s = k * TILE; s < (k + 1) * TILE; s += LANES) sum += load(weight + s) * load(change + s);
                *along_row.part(k, 1) += sum_of(sum);
            }
        }

        // The second sweep: gradients of the scores, and what they add to those of queries, keys and pre's factors.
        void add_key_gradients(int64_t j, int64_t used) const {
            const float* weight = weights.part(used, plan.tile);
            float* change = changes.part(used, plan.tile);
            for (int64_t k = 0; k < queries.number * H; k++) {
                const float sum = *along_row.part(k, 1);
                for (int64_t s = k * TILE; s < (k + 1) * TILE; s += LANES)
                    store(change + s, load(weight + s) * (load(change + s) - sum));
            }
            if (plan.pre_factors)
                go_back(plan.pre, scores.part(used, plan.tile), change, queries.pre,
                        packed.pre.part(queries.b * plan.tiles + j, plan.pre_factors), pre_gradient,
                        gradients.pre.part(w * plan.tiles + j, plan.pre_factors), gradients.pre_static);
            for (int64_t h = 0; h < H; h++) {
                product<true>(rows, K, TILE, change + h * TILE, H * TILE, 1,
                              packed.key_rows.part(plan.key_tile(queries.b, j, h), TILE * K), PANEL, K,
                              query_gradient.part(h, rows * K), K);
                product<true>(TILE, K, queries.number, change + h * TILE, 1, H * TILE, query.part(h, rows * K), PANEL,
                              K, gradients.keys.part(plan.key_tile(w, j, h), TILE * K), K);
            }
        }

        // From the gradient of a composition's output to that of its input, and of what it is composed by.
        void go_back(const Stage& stage, const float* in, float* change, const Floats& factors,
                     const float* key_factors, const Floats& factor_gradient, float* key_gradient,
                     const Floats& static_gradient) const {
            const int64_t size = queries.number * plan.row_factors;
            compose_backward<R>(in, change, queries.number, heads_of(plan, stage), factors.part(0, size), key_factors,
                                factor_gradient.part(0, size), key_gradient, static_gradient.part(w, gradients.map),
                                sums.part(0, (4 * R + H) * TILE));
        }
    };

    // The gradients of one tile's keys, values and factors: the sums of what these threads have.
    void write_tile(int64_t b, int64_t j, const Gradients& all, int64_t first_thread, int64_t threads) const {
        const auto sum = [&](const Floats& array, int64_t size) {
            float* total = array.part(first_thread * plan.tiles + j, size);
            for (int64_t w = first_thread + 1; w < first_thread + threads; w++)
                add(total, array.part(w * plan.tiles + j, size), size);
            return total;
        };
        const int64_t first = j * TILE, number = least(TILE, plan.last_key - first), KH = plan.key_heads;
        const float *keys = sum(all.keys, KH * TILE * plan.key_row), *pre = sum(all.pre, plan.pre_factors);
        const float *values = sum(all.values, KH * TILE * plan.value_row), *post = sum(all.post, plan.post_factors);
        for (int64_t h = 0; h < KH; h++)
            for (int64_t s = 0; s < number; s++) {
                write_row(plan.key_gradient, offset_of(plan.key_gradient, b, h, first + s),
                          keys + (h * TILE + s) * plan.key_row, plan.channels, 1.0f);
                write_row(plan.value_gradient, offset_of(plan.value_gradient, b, h, first + s),
                          values + (h * TILE + s) * plan.value_row, plan.value_channels, 1.0f);
            }
        for (int64_t h = 0; h < plan.heads; h++) {
            write_factors(plan.pre.key_gradient, R, b, h, first, number, pre + h * C * TILE, TILE);
            write_factors(plan.post.key_gradient, R, b, h, first, number, post + h * C * TILE, TILE);
        }
    }
};

// Runs `work`, and returns null or why it failed.
template <class Work>
const char* failure_of(const Work& work) {
    try {
        work();
    } catch (const char* failure) {
        return failure;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return nullptr;
}

template <class Work>
const char* by_rank(const Call& call, const Work& work) {
    const int64_t channels = most(most(call.pre.query.channels, call.pre.key.channels),
                                  most(call.post.query.channels, call.post.key.channels));
    return failure_of([&] {
        if (channels / 2 <= 2) work(std::integral_constant<int, 2>());
        else if (channels / 2 <= 4) work(std::integral_constant<int, 4>());
        else if (channels / 2 <= 8) work(std::integral_constant<int, 8>());
        else throw "the rank is above 8";
    });
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED int64_t dcformer_sizes[] = {sizeof(Call), sizeof(Projection)};

EXPORTED const char* dcformer_forward(const Call* call) {
    const bool are_few = call->last_query <= FEW && call->scores.type == NONE && call->log_sums.type == NONE;
    return by_rank(*call, [&](auto rank) {
        if (are_few) FewQueries<rank()>(*call).run();
        else Forward<rank()>(*call).run();
    });
}

EXPORTED const char* dcformer_backward(const Call* call) {
    return by_rank(*call, [&](auto rank) { Backward<rank()>(*call).run(); });
}

EXPORTED const char* dcformer_project(const Projection* call) {
    return failure_of([&] { project(*call); });
}

}  // extern "C"
