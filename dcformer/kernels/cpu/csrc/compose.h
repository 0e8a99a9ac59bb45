// Equation 7 on a tile of scores or weights, its adjoint, and the gradients of its factors.
//
// A tile is [query][head][TILE keys]. Factors of a query are [head][w1 of each rank, w2 of each rank, 1 + gate]; those
// of keys are [head][w1 of each rank, w2 of each rank, gate][TILE keys]. R is the rank, padded with zeros where need
// be.
#pragma once
#include "vectors.h"

namespace {

template <int R>
constexpr int CHANNELS = 2 * R + 1;

struct Heads {
    int64_t all, groups;      // heads, and groups of consecutive heads that compose among themselves
    const float* static_map;  // [group][head in][head out], or null
};

// `out` = C(`in`), which may be the same tile, for Q queries at once: they share the loads of the keys' factors.
// `scale` [query][head] multiplies `in` first, unless it is null. `scratch` has Q * heads * LANES floats.
template <int R, int Q, bool SCALED>
inline void compose_queries(const float* in, float* out, const Heads& heads, const float* query_factors,
                            const float* key_factors, const float* scale, float* scratch) {
    constexpr int C = CHANNELS<R>;
    const int64_t row = heads.all * TILE, size = heads.all / heads.groups, factor_row = heads.all * C;
    for (int64_t s = 0; s < TILE; s += LANES) {
        for (int64_t first = 0; first < heads.all; first += size) {
            Vector by_query[Q][R], by_key[Q][R];
#pragma GCC unroll 4
            for (int t = 0; t < Q; t++)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) by_query[t][r] = by_key[t][r] = Vector{};
            for (int64_t h = first; h < first + size; h++) {
                const float* keys = key_factors + h * C * TILE + s;
                const float* a = in + h * TILE + s;
                const float* queries = query_factors + h * C;
                Vector w1[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) w1[r] = load(keys + r * TILE);
#pragma GCC unroll 4
                for (int t = 0; t < Q; t++) {
                    Vector x = load(a + t * row);
                    if (SCALED) x *= scale[t * heads.all + h];
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        by_query[t][r] += x * queries[t * factor_row + r];
                        by_key[t][r] += x * w1[r];
                    }
                }
            }
            if (heads.static_map)
                for (int t = 0; t < Q; t++)
                    for (int64_t n = 0; n < size; n++) {
                        Vector sum{};
                        const float* column = heads.static_map + first * size + n;
                        for (int64_t m = 0; m < size; m++) {
                            Vector x = load(in + t * row + (first + m) * TILE + s);
                            if (SCALED) x *= scale[t * heads.all + first + m];
                            sum += x * column[m * size];
                        }
                        store(scratch + (t * heads.all + first + n) * LANES, sum);
                    }
            for (int64_t h = first; h < first + size; h++) {
                const float* keys = key_factors + h * C * TILE + s;
                const float* a = in + h * TILE + s;
                const float* queries = query_factors + h * C;
                const Vector gate = load(keys + 2 * R * TILE);
                Vector w2[R];
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) w2[r] = load(keys + (R + r) * TILE);
#pragma GCC unroll 4
                for (int t = 0; t < Q; t++) {
                    Vector x = load(a + t * row);
                    if (SCALED) x *= scale[t * heads.all + h];
                    Vector y = x * (gate + queries[t * factor_row + 2 * R]);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        y += by_query[t][r] * queries[t * factor_row + R + r];
                        y += by_key[t][r] * w2[r];
                    }
                    if (heads.static_map) y += load(scratch + (t * heads.all + h) * LANES);
                    store(out + t * row + h * TILE + s, y);
                }
            }
        }
    }
}

template <int R, bool SCALED>
void compose(const float* in, float* out, int64_t queries, const Heads& heads, const float* query_factors,
             const float* key_factors, const float* scale, float* scratch) {
    constexpr int TOGETHER = R > 2 ? 1 : LANES == 8 ? 2 : 4;
    const int64_t row = heads.all * TILE, factor_row = heads.all * CHANNELS<R>;
    int64_t t = 0;
    for (; t + TOGETHER <= queries; t += TOGETHER)
        compose_queries<R, TOGETHER, SCALED>(in + t * row, out + t * row, heads, query_factors + t * factor_row,
                                             key_factors, scale + (SCALED ? t * heads.all : 0), scratch);
    for (; t < queries; t++)
        compose_queries<R, 1, SCALED>(in + t * row, out + t * row, heads, query_factors + t * factor_row, key_factors,
                                      scale + (SCALED ? t * heads.all : 0), scratch);
}

// From `x`, the input of a composition, and `d`, the gradient of its output, one query after another: `d` becomes the
// gradient of the input, and what this tile contributes is added to the gradients of the factors, laid out as these
// are, and of the static map. With L_r = sum_h x w1_r and R_r = sum_h d w2_r the terms are
//     dx = d (1 + gates) + sum_r w1_r R_r,    dgate = x d,    dw1_r = x R_r,    dw2_r = d L_r,
// summed over keys for a query's factors and over queries for a key's. `scratch` has (4 R + heads) * TILE floats.
template <int R>
void compose_backward(const float* x, float* d, int64_t queries, const Heads& heads, const float* query_factors,
                      const float* key_factors, float* query_gradients, float* key_gradients, float* static_gradient,
                      float* scratch) {
    constexpr int C = CHANNELS<R>;
    const int64_t row = heads.all * TILE, size = heads.all / heads.groups;
    float* sums = scratch;  // [L of the query, L of the key, R of the query, R of the key][rank][TILE keys]
    float* mixed = scratch + 4 * R * TILE;
    for (int64_t t = 0; t < queries; t++, x += row, d += row) {
        const float* of_query = query_factors + t * heads.all * C;
        float* query_gradient = query_gradients + t * heads.all * C;
        for (int64_t first = 0; first < heads.all; first += size) {
            for (int64_t s = 0; s < TILE; s += LANES) {
                Vector totals[4][R];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) totals[i][r] = Vector{};
                for (int64_t h = first; h < first + size; h++) {
                    const float* keys = key_factors + h * C * TILE + s;
                    const Vector xs = load(x + h * TILE + s), ds = load(d + h * TILE + s);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        totals[0][r] += xs * of_query[h * C + r];
                        totals[1][r] += xs * load(keys + r * TILE);
                        totals[2][r] += ds * of_query[h * C + R + r];
                        totals[3][r] += ds * load(keys + (R + r) * TILE);
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) store(sums + (i * R + r) * TILE + s, totals[i][r]);
            }
            if (heads.static_map)
                for (int64_t m = 0; m < size; m++) {
                    const float* map = heads.static_map + (first + m) * size;
                    float* gradient = static_gradient + (first + m) * size;
                    for (int64_t s = 0; s < TILE; s += LANES) {
                        Vector sum{};
                        for (int64_t n = 0; n < size; n++) sum += load(d + (first + n) * TILE + s) * map[n];
                        store(mixed + (first + m) * TILE + s, sum);
                    }
                    for (int64_t n = 0; n < size; n++) {
                        Vector sum{};
                        for (int64_t s = 0; s < TILE; s += LANES)
                            sum += load(x + (first + m) * TILE + s) * load(d + (first + n) * TILE + s);
                        gradient[n] += sum_of(sum);
                    }
                }
            for (int64_t h = first; h < first + size; h++) {
                const float *keys = key_factors + h * C * TILE, *queries_h = of_query + h * C;
                float* key_gradient = key_gradients + h * C * TILE;
                Vector partial[C];
#pragma GCC unroll 17
                for (int c = 0; c < C; c++) partial[c] = Vector{};
                for (int64_t s = 0; s < TILE; s += LANES) {
                    const Vector xs = load(x + h * TILE + s), ds = load(d + h * TILE + s), both = xs * ds;
                    Vector dx = ds * (load(keys + 2 * R * TILE + s) + queries_h[2 * R]);
                    partial[2 * R] += both;
                    store(key_gradient + 2 * R * TILE + s, load(key_gradient + 2 * R * TILE + s) + both);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const Vector left_query = load(sums + r * TILE + s), left_key = load(sums + (R + r) * TILE + s);
                        const Vector right_query = load(sums + (2 * R + r) * TILE + s);
                        const Vector right_key = load(sums + (3 * R + r) * TILE + s);
                        dx += right_query * queries_h[r] + right_key * load(keys + r * TILE + s);
                        partial[r] += xs * right_query;
                        partial[R + r] += ds * left_query;
                        float *w1 = key_gradient + r * TILE + s, *w2 = key_gradient + (R + r) * TILE + s;
                        store(w1, load(w1) + xs * right_key);
                        store(w2, load(w2) + ds * left_key);
                    }
                    if (heads.static_map) dx += load(mixed + h * TILE + s);
                    store(d + h * TILE + s, dx);
                }
#pragma GCC unroll 17
                for (int c = 0; c < C; c++) query_gradient[h * C + c] += sum_of(partial[c]);
            }
        }
    }
}

}  // namespace
