/* Advances a part of a model by one step while it is in a core's cache: detects what a script has changed, mixes in what
   arrived, takes Adam's step, and copies and hashes the snapshot for the neighbors.

   A digest is NH with random keys, twice with shifted keys (Toeplitz; Black et al., UMAC, CRYPTO 1999, section 5): two
   different grains have the same digest with a probability of at most 2^-64. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__)
#error "without AVX2 and fused multiply-add in hardware, these loops would be slow"
#endif
#include <immintrin.h>
#endif

enum { GRAIN = 8192, FLOATS = GRAIN / 4, SHIFT = 4, MOST = 16 };

typedef uint64_t u64;

static inline u64 product(u64 word, u64 key) {
    return (u64)(uint32_t)(word + key) * (uint32_t)((word >> 32) + (key >> 32));
}

static void digest(const unsigned char *at, size_t size, const u64 *restrict keys, u64 *restrict mark) {
    u64 first = 0, second = 0;
    size_t i = 0, words = size / 8;
#if defined(__AVX512F__)
    __m512i a = _mm512_setzero_si512(), b = a;
    u64 lanes[2][8];  /* _mm512_reduce_add_epi64 adds signed numbers, which must not overflow */
    for (; i + 8 <= words; i += 8) {
        __m512i word = _mm512_loadu_si512(at + 8 * i);
        __m512i x = _mm512_add_epi32(word, _mm512_loadu_si512(keys + i));
        __m512i y = _mm512_add_epi32(word, _mm512_loadu_si512(keys + i + SHIFT));
        a = _mm512_add_epi64(a, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
        b = _mm512_add_epi64(b, _mm512_mul_epu32(y, _mm512_srli_epi64(y, 32)));
    }
#elif defined(__AVX2__)
    __m256i a = _mm256_setzero_si256(), b = a;
    u64 lanes[2][4];
    for (; i + 4 <= words; i += 4) {
        __m256i word = _mm256_loadu_si256((const void *)(at + 8 * i));
        __m256i x = _mm256_add_epi32(word, _mm256_loadu_si256((const void *)(keys + i)));
        __m256i y = _mm256_add_epi32(word, _mm256_loadu_si256((const void *)(keys + i + SHIFT)));
        a = _mm256_add_epi64(a, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
        b = _mm256_add_epi64(b, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
    }
#endif
#if defined(__x86_64__)
    memcpy(lanes[0], &a, sizeof a);
    memcpy(lanes[1], &b, sizeof b);
    for (size_t j = 0; j < sizeof lanes[0] / 8; j++) {
        first += lanes[0][j];
        second += lanes[1][j];
    }
#endif
    for (; 8 * i < size; i++) {
        u64 word = 0;
        memcpy(&word, at + 8 * i, size - 8 * i < 8 ? size - 8 * i : 8);
        first += product(word, keys[i]);
        second += product(word, keys[i + SHIFT]);
    }
    mark[0] = first;
    mark[1] = second;
}

static int same(const unsigned char *at, size_t size, const u64 *keys, const u64 *mark) {
    u64 now[2];
    digest(at, size, keys, now);
    return now[0] == mark[0] && now[1] == mark[1];
}

/* Copies with stores that bypass the cache, because another process reads the copy next. */
static void copy(unsigned char *restrict to, const unsigned char *restrict from, size_t size) {
#if defined(__AVX512F__)
    if (((uintptr_t)to & 63) == 0 && size % 64 == 0) {
        for (size_t i = 0; i < size; i += 64)
            _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
        return;
    }
#elif defined(__AVX2__)
    if (((uintptr_t)to & 31) == 0 && size % 32 == 0) {
        for (size_t i = 0; i < size; i += 32)
            _mm256_stream_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
        return;
    }
#endif
    memcpy(to, from, size);
}

static void settle(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Returns whether `size` bytes still have the digests `marks`, two numbers for each grain. */
int unchanged(size_t size, const unsigned char *at, const u64 *keys, const u64 *marks) {
    for (size_t i = 0; i < size; i += GRAIN, marks += 2)
        if (!same(at + i, size - i < GRAIN ? size - i : GRAIN, keys, marks))
            return 0;
    return 1;
}

/* Copies `size` bytes, once or twice (`second` may be NULL), and writes their digests to `marks`. */
void snapshot(size_t size, const unsigned char *from, unsigned char *to, unsigned char *second, const u64 *keys,
              u64 *marks) {
    for (size_t i = 0; i < size; i += GRAIN, marks += 2) {
        size_t some = size - i < GRAIN ? size - i : GRAIN;
        digest(from + i, some, keys, marks);
        copy(to + i, from + i, some);
        if (second)
            copy(second + i, from + i, some);
    }
    settle();
}

struct mixing {
    const float *sent;          /* the snapshot of x that was sent */
    const float *arrived[MOST]; /* the neighbors' snapshots */
    float own, less, weights[MOST]; /* less: own - 1 */
    int64_t count;
};

/* x <- own x + sum of weight * arrived; if x differs from what was sent: x + (own - 1) sent + the same sum. */
static void mix(size_t n, float *restrict x, size_t at, const struct mixing *how, const u64 *keys, const u64 *mark) {
    const float *restrict first = how->arrived[0] + at;
    float own = how->own, weight = how->weights[0];
    if (same((const unsigned char *)x, 4 * n, keys, mark)) {
        for (size_t i = 0; i < n; i++)
            x[i] = fmaf(weight, first[i], own * x[i]);
    } else {
        const float *restrict sent = how->sent + at;
        float less = how->less;
        for (size_t i = 0; i < n; i++)
            x[i] = fmaf(weight, first[i], fmaf(less, sent[i], x[i]));
    }
    for (int64_t k = 1; k < how->count; k++) {
        const float *restrict other = how->arrived[k] + at;
        weight = how->weights[k];
        for (size_t i = 0; i < n; i++)
            x[i] = fmaf(weight, other[i], x[i]);
    }
}

/* One of several parameters that are adjacent in memory, with its optimizer state. */
struct row {
    int64_t size, whole; /* whole: so many elements fill torch's vectors, torch processes the others one by one */
    const float *gradient;
    float *first, *second;
    float lerp, keep, share, step, root, eps, decay, shrink, sign;
    int32_t decays; /* 1: decay * x is added to the gradient, 2: x becomes shrink * x */
};

enum { VECTORS = 0, ONE_BY_ONE = 1 }; /* the two ways in which torch rounds v */

/* torch's fused Adam for CPUs, with its order of roundings, which the caller tests (parallel/buckets/advance.py). */
static inline void adam(size_t n, float *restrict x, const struct row *row, size_t at, int decays,
                        int rounding) {
    const float *restrict gradient = row->gradient + at;
    float *restrict first = row->first + at, *restrict second = row->second + at;
    float lerp = row->lerp, keep = row->keep, share = row->share, step = row->step, root = row->root, eps = row->eps;
    float sign = row->sign, decay = row->decay, shrink = row->shrink;
    for (size_t i = 0; i < n; i++) {
        float g = sign * gradient[i], w = x[i];
        if (decays == 1)
            g = fmaf(w, decay, g);
        if (decays == 2)
            w = w * shrink;
        float m = fmaf(lerp, g - first[i], first[i]);
        float v = rounding == VECTORS ? fmaf(share * g, g, second[i] * keep) : fmaf(second[i], keep, share * g * g);
        first[i] = m;
        second[i] = v;
        x[i] = w + step * m / (sqrtf(v) / root + eps);
    }
}

static inline void update_alike(size_t n, float *x, const struct row *row, size_t at, int rounding) {
    if (row->decays == 1)
        adam(n, x, row, at, 1, rounding);
    else if (row->decays == 2)
        adam(n, x, row, at, 2, rounding);
    else
        adam(n, x, row, at, 0, rounding);
}

static void update(size_t n, float *x, const struct row *row, size_t at) {
    size_t whole = (size_t)row->whole, some = at >= whole ? 0 : whole - at < n ? whole - at : n;
    if (some)
        update_alike(some, x, row, at, VECTORS);
    if (some < n)
        update_alike(n - some, x + some, row, at + some, ONE_BY_ONE);
}

/* Advances grains `from` to `to` of a part of n floats at x. Any of mixing, row and place may be NULL. */
void advance(size_t n, size_t from, size_t to, float *x, const struct mixing *mixing, const struct row *row,
             float *place, const u64 *keys, u64 *marks) {
    size_t inside = from * FLOATS; /* the next float's index in its row */
    if (row)
        for (; inside >= (size_t)row->size; row++)
            inside -= row->size;
    for (size_t grain = from; grain < to; grain++) {
        size_t at = grain * FLOATS, some = n - at < FLOATS ? n - at : FLOATS;
        if (mixing)
            mix(some, x + at, at, mixing, keys, marks + 2 * grain);
        for (size_t done = 0; row && done < some;) {
            size_t left = row->size - inside, piece = left < some - done ? left : some - done;
            update(piece, x + at + done, row, inside);
            done += piece;
            inside += piece;
            if (inside == (size_t)row->size) {
                row++;
                inside = 0;
            }
        }
        if (place) {
            digest((const unsigned char *)(x + at), 4 * some, keys, marks + 2 * grain);
            copy((unsigned char *)(place + at), (const unsigned char *)(x + at), 4 * some);
        }
    }
    settle();
}
