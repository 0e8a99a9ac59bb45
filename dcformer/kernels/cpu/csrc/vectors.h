// Vectors of float32 by an extension of the compilers: one source for AVX2, AVX-512 and NEON.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12, VECTORS = 2, TILE = 96;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6, VECTORS = 2, TILE = 48;
#else
constexpr int LANES = 4, ROWS = 6, VECTORS = 4, TILE = 48;
#endif
// A product of matrices makes ROWS x PANEL numbers in registers. A tile is TILE keys of every head: a multiple of both.
constexpr int PANEL = LANES * VECTORS;
static_assert(TILE % PANEL == 0 && TILE % ROWS == 0, "tiles hold whole panels and whole blocks of rows");

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vector load(const float* p) { return *(const Unaligned*)p; }
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
inline Vector load(const uint16_t* p) {  // bfloat16
    const Integers bits = __builtin_convertvector(*(const Halves*)p, Integers) << 16;
    Vector v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}
inline void store(float* p, Vector v) { *(Unaligned*)p = v; }
inline Vector fill(float x) { return x - Vector{}; }  // x + 0 would be computed, for the sake of -0
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

typedef float Four __attribute__((vector_size(16)));
inline Four add4(Four a, Four b) { return a + b; }
inline Four larger4(Four a, Four b) { return a > b ? a : b; }

template <Four (*fold)(Four, Four)>
inline float reduced(Vector v) {
    Four parts[LANES / 4];
    memcpy(parts, &v, sizeof(v));
    for (int width = LANES / 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) parts[i] = fold(parts[i], parts[i + width]);
    const Four x = parts[0], y = fold(x, Four{x[2], x[3], x[0], x[1]});
    return fold(y, Four{y[1], y[0], y[3], y[2]})[0];
}
inline float sum_of(Vector v) { return reduced<add4>(v); }
inline float largest_of(Vector v) { return reduced<larger4>(v); }

// e^x to 1e-7 relative; exactly 0 below -87. NaN stays NaN.
inline Vector exponential(Vector x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which its last bits then hold
    Vector power = x * 1.44269504f;
    Vector shifted = power + magic;
    Vector f = power - (shifted - magic);  // in [-0.5, 0.5]
    Vector p = fill(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    Integers bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits - (0x4B400000 - 127)) << 23;
    Vector scale;
    memcpy(&scale, &bits, sizeof(scale));
    return x < -87.0f ? Vector{} : p * scale;
}

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) {  // bfloat16
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr const char* NO_MEMORY = "there is not enough memory";

// An array, 64-byte aligned. It is used in parts, with a check of their bounds.
template <class T>
class Array {
    const int64_t size;
    void* const memory;

   public:
    explicit Array(int64_t number) : size(number), memory(malloc(number * sizeof(T) + 64)) {
        if (memory == nullptr) throw NO_MEMORY;
    }
    ~Array() { free(memory); }
    Array(const Array&) = delete;

    // Part i of the array in parts of `number` elements.
    T* part(int64_t i, int64_t number) const {
        if (i < 0 || number < 0 || (i + 1) * number > size) throw "an array is too small";
        return (T*)(((uintptr_t)memory + 63) / 64 * 64) + i * number;
    }
    T* zeros(int64_t i, int64_t number) const { return (T*)memset(part(i, number), 0, number * sizeof(T)); }
};
typedef Array<float> Floats;

// C (+)= A B for `rows` rows of A and `columns` columns of B, both multiples of ROWS and LANES. A is read one number at
// a time, at a + row * a_row + k * a_step. B is read in panels of PANEL columns, at b + panel * b_panel + k * b_step.
template <int M, int N, bool ADD>
inline void product_in_registers(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b,
                                 int64_t b_step, float* c, int64_t c_row) {
    Vector sums[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) sums[i][j] = ADD ? load(c + i * c_row + j * LANES) : Vector{};
    for (int64_t k = 0; k < depth; k++) {
        Vector right[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) right[j] = load(b + k * b_step + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            Vector left = fill(a[i * a_row + k * a_step]);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) sums[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) store(c + i * c_row + j * LANES, sums[i][j]);
}

template <bool ADD>
void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
             const float* b, int64_t b_panel, int64_t b_step, float* c, int64_t c_row) {
    int64_t column = 0;
    for (; column + PANEL <= columns; column += PANEL, b += b_panel)
        for (int64_t row = 0; row < rows; row += ROWS)
            product_in_registers<ROWS, VECTORS, ADD>(depth, a + row * a_row, a_row, a_step, b, b_step,
                                                     c + row * c_row + column, c_row);
    for (; column < columns; column += LANES, b += LANES)
        for (int64_t row = 0; row < rows; row += ROWS)
            product_in_registers<ROWS, 1, ADD>(depth, a + row * a_row, a_row, a_step, b, b_step,
                                               c + row * c_row + column, c_row);
}

}  // namespace
