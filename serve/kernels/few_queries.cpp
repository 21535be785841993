// Causal attention of a few new tokens over a long KV cache, in bfloat16. What it computes: few_queries.py.
//
// Keys are walked in tiles. The queries that share a KV head lie in the lanes of vectors, so a key is broadcast once for
// all of them and no sum runs across lanes. The softmax is kept up tile by tile (online softmax, arXiv 1805.02867).
// Products are of pairs of bfloat16, sums in float32.

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512VL__)
#include <algorithm>
#include <immintrin.h>

namespace {

constexpr int LANES = 16;    // queries in a vector
constexpr int TILE = 128;    // keys worked on at a time
constexpr int AHEAD = 32;    // keys fetched before their turn: the processor does not follow from tile to tile
constexpr float HIDDEN = -1e30f;

inline uint16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e to the power of x for x <= 0, within 2 units in the last place; 0 below the smallest float.
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-105.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.3888889e-3f);
    for (float factor : {8.3333333e-3f, 4.1666668e-2f, 0.16666667f, 0.5f, 1.0f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(p, n);
}

inline __m512i widened(const void* sixteen) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(sixteen)));
}

// Two rows of sixteen bfloat16 as sixteen pairs.
inline __m512i paired(__m512i first, __m512i second) { return _mm512_or_si512(first, _mm512_slli_epi32(second, 16)); }

struct Call {
    const uint16_t* query;  // [tokens, group, DIM] of one KV head, `query_stride` between tokens
    int64_t query_stride;
    int tokens, group;
    const uint16_t *key, *value;  // [keys, DIM]
    int64_t keys;
    float scale;
    uint16_t* out;  // as query
    int64_t out_stride;
};

// Fades the sums of some rows, and adds the values of a tile to them.
template <int BLOCK, int ROWS, int DIM>
inline void mix(int row, int pairs, const uint32_t (*weights)[ROWS], const uint32_t (*values)[DIM],
                const float* fading, float (*sums)[DIM]) {
    constexpr int PARTS = DIM / LANES;
    __m512 sum[BLOCK][PARTS];
    int at[BLOCK];
    for (int r = 0; r < BLOCK; r++) {
        at[r] = std::min(row + r, ROWS - 1);
        for (int part = 0; part < PARTS; part++)
            sum[r][part] = _mm512_mul_ps(_mm512_load_ps(&sums[row + r][part * LANES]), _mm512_set1_ps(fading[at[r]]));
    }
    for (int pair = 0; pair < pairs; pair++)
        for (int r = 0; r < BLOCK; r++) {
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(weights[pair][at[r]]));
            for (int part = 0; part < PARTS; part++)
                sum[r][part] =
                    _mm512_dpbf16_ps(sum[r][part], weight, (__m512bh)_mm512_load_si512(&values[pair][part * LANES]));
        }
    for (int r = 0; r < BLOCK; r++)
        for (int part = 0; part < PARTS; part++) _mm512_store_ps(&sums[row + r][part * LANES], sum[r][part]);
}

template <int DIM, int VECTORS>
void attend(const Call& call) {
    constexpr int ROWS = VECTORS * LANES;
    constexpr int KEYS = VECTORS > 4 ? 1 : 8 / VECTORS;  // as many sums as a product takes cycles
    const int rows = call.tokens * call.group;
    const int64_t first_new = call.keys - call.tokens;
    alignas(64) static thread_local uint32_t queries[DIM / 2][ROWS];
    alignas(64) static thread_local float scores[TILE + KEYS][ROWS];
    alignas(64) static thread_local uint32_t weights[TILE / 2][ROWS];
    alignas(64) static thread_local uint32_t values[TILE / 2][DIM];
    alignas(64) static thread_local float sums[ROWS + 6][DIM];
    alignas(64) float fading[ROWS], totals[ROWS];
    std::memset(queries, 0, sizeof queries);
    std::memset(sums, 0, sizeof sums);
    for (int row = 0; row < rows; row++) {
        const uint16_t* query = call.query + row / call.group * call.query_stride + row % call.group * DIM;
        for (int pair = 0; pair < DIM / 2; pair++) std::memcpy(&queries[pair][row], query + 2 * pair, 4);
    }
    // From two rows of 32 values their first, or last, 16 pairs.
    const __m512i FRONT = _mm512_or_si512(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_slli_epi32(_mm512_setr_epi32(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42,
                                                                              43, 44, 45, 46, 47), 16));
    const __m512i BACK = _mm512_add_epi16(FRONT, _mm512_set1_epi16(LANES));
    __m512 top[VECTORS], total[VECTORS];
    for (int v = 0; v < VECTORS; v++) top[v] = _mm512_set1_ps(HIDDEN), total[v] = _mm512_setzero_ps();

    for (int64_t begin = 0; begin < call.keys; begin += TILE) {
        const int count = static_cast<int>(std::min<int64_t>(TILE, call.keys - begin)), pairs = (count + 1) / 2;
        __m512 higher[VECTORS];
        std::copy(top, top + VECTORS, higher);
        for (int k = 0; k < count; k += KEYS) {  // several keys at once: one sum alone waits for itself
            const uint16_t* key[KEYS];
            __m512 score[KEYS][VECTORS];
            for (int u = 0; u < KEYS; u++) {
                key[u] = call.key + (begin + std::min(k + u, count - 1)) * DIM;
                for (int v = 0; v < VECTORS; v++) score[u][v] = _mm512_setzero_ps();
                for (int d = 0; d < DIM; d += 32) {
                    _mm_prefetch(call.value + (begin + k + u) * DIM + d, _MM_HINT_T0);
                    _mm_prefetch(key[u] + AHEAD * DIM + d, _MM_HINT_T0);
                }
            }
            for (int pair = 0; pair < DIM / 2; pair++)
#pragma GCC unroll 16  // without it the compiler keeps the sums in memory
                for (int u = 0; u < KEYS; u++) {
                    int32_t both;
                    std::memcpy(&both, key[u] + 2 * pair, 4);
                    const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 16
                    for (int v = 0; v < VECTORS; v++)
                        score[u][v] = _mm512_dpbf16_ps(
                            score[u][v], (__m512bh)_mm512_load_si512(&queries[pair][v * LANES]), broadcast);
                }
            for (int u = 0; u < KEYS; u++)
                for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&scores[k + u][v * LANES], score[u][v]);
        }
        for (int k = 0; k < count; k++) {
            const int64_t after = begin + k - first_new;  // > 0: a new token, hidden from the queries before it
            for (int v = 0; v < VECTORS; v++) {
                __m512 score = _mm512_mul_ps(_mm512_load_ps(&scores[k][v * LANES]), _mm512_set1_ps(call.scale));
                const int64_t blind = after > 0 ? after * call.group - v * LANES : 0;
                if (blind > 0) {
                    const __mmask16 lanes = blind >= LANES ? 0xffff : static_cast<__mmask16>((1u << blind) - 1);
                    score = _mm512_mask_mov_ps(score, lanes, _mm512_set1_ps(HIDDEN));
                }
                higher[v] = _mm512_max_ps(higher[v], score);
                _mm512_store_ps(&scores[k][v * LANES], score);
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const __m512 fade = exponential(_mm512_sub_ps(top[v], higher[v]));
            _mm512_store_ps(&fading[v * LANES], fade);
            total[v] = _mm512_mul_ps(total[v], fade);
            top[v] = higher[v];
        }
        for (int pair = 0; pair < pairs; pair++) {
            const bool odd = 2 * pair + 1 == count;
            for (int v = 0; v < VECTORS; v++) {
                const float* score = &scores[2 * pair][v * LANES];
                const __m512 one = exponential(_mm512_sub_ps(_mm512_load_ps(score), top[v]));
                const __m512 two =
                    odd ? _mm512_setzero_ps() : exponential(_mm512_sub_ps(_mm512_load_ps(score + ROWS), top[v]));
                total[v] = _mm512_add_ps(total[v], _mm512_add_ps(one, two));
                const __m256bh narrow_one = _mm512_cvtneps_pbh(one), narrow_two = _mm512_cvtneps_pbh(two);
                _mm512_store_si512(&weights[pair][v * LANES], paired(widened(&narrow_one), widened(&narrow_two)));
            }
            const uint16_t* value = call.value + (begin + 2 * pair) * DIM;
            const uint16_t* next = value + (odd ? 0 : DIM);
            for (int d = 0; d < DIM; d += 2 * LANES) {
                const __m512i first = _mm512_loadu_si512(value + d), second = _mm512_loadu_si512(next + d);
                _mm512_store_si512(&values[pair][d], _mm512_permutex2var_epi16(first, FRONT, second));
                _mm512_store_si512(&values[pair][d + LANES], _mm512_permutex2var_epi16(first, BACK, second));
            }
        }
        constexpr int BLOCK = DIM == 64 ? 6 : 3;  // rows whose sums fit in registers
        for (int row = 0; row < rows; row += rows - row <= 3 ? 3 : BLOCK)
            rows - row <= 3 ? mix<3, ROWS, DIM>(row, pairs, weights, values, fading, sums)
                            : mix<BLOCK, ROWS, DIM>(row, pairs, weights, values, fading, sums);
    }
    for (int v = 0; v < VECTORS; v++) _mm512_store_ps(&totals[v * LANES], total[v]);
    for (int row = 0; row < rows; row++) {
        uint16_t* out = call.out + row / call.group * call.out_stride + row % call.group * DIM;
        for (int d = 0; d < DIM; d++) out[d] = rounded(sums[row][d] / totals[row]);
    }
}

template <int DIM>
void choose(const Call& call) {
    switch ((call.tokens * call.group + LANES - 1) / LANES) {
        case 1: return attend<DIM, 1>(call);
        case 2: return attend<DIM, 2>(call);
        case 3: return attend<DIM, 3>(call);
        case 4: return attend<DIM, 4>(call);
        case 5: return attend<DIM, 5>(call);
        default: return attend<DIM, 6>(call);
    }
}

}  // namespace

extern "C" int few_queries(const uint16_t* query, int64_t query_stride, int tokens, int group, int kv_heads, int dim,
                           const uint16_t* key, const uint16_t* value, int64_t head_stride, int64_t keys, float scale,
                           uint16_t* out, int64_t out_stride) {
    if ((dim != 64 && dim != 128) || tokens * group > 6 * LANES || tokens < 1 || group < 1 || keys < tokens) return -1;
    for (int head = 0; head < kv_heads; head++) {
        const Call call{query + head * group * dim, query_stride,  tokens, group,
                        key + head * head_stride,   value + head * head_stride, keys,  scale,
                        out + head * group * dim,   out_stride};
        dim == 64 ? choose<64>(call) : choose<128>(call);
    }
    return 0;
}

#else

extern "C" int few_queries(const uint16_t*, int64_t, int, int, int, int, const uint16_t*, const uint16_t*, int64_t, int64_t,
                           float, uint16_t*, int64_t) {
    return -1;  // this processor multiplies no pairs of bfloat16
}

#endif
