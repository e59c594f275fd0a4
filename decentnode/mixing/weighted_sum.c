/* out <- own x + w_0 r_0 + w_1 r_1 ..., added in this order. Every product but the first is added without rounding it
   first, which gives the bits of torch's mul and add_. Everything is read once and written once. */
#include <math.h>
#include <stddef.h>

#if defined(__x86_64__) && !defined(__FMA__)
#error "without fused multiply-add in hardware, fmaf would be slow"
#endif

enum { PIECE = 2048 };

#define LOOP(sum)                      \
    for (size_t i = 0; i < n; i++)     \
        out[i] = sum;                  \
    return;
#define FIRST fmaf(w[0], a[i], own * x[i])

/* The weighted sum of up to four arrivals, which are read from element `at` on. out may be x. */
static void few(size_t n, float *out, const float *x, float own, size_t count, const float *const *r, const float *w,
                size_t at) {
    const float *a = count > 0 ? r[0] + at : x, *b = count > 1 ? r[1] + at : x, *c = count > 2 ? r[2] + at : x,
                *d = count > 3 ? r[3] + at : x;
    switch (count) {
    case 0: LOOP(own * x[i])
    case 1: LOOP(FIRST)
    case 2: LOOP(fmaf(w[1], b[i], FIRST))
    case 3: LOOP(fmaf(w[2], c[i], fmaf(w[1], b[i], FIRST)))
    default: LOOP(fmaf(w[3], d[i], fmaf(w[2], c[i], fmaf(w[1], b[i], FIRST))))
    }
}

void weighted_sum(size_t n, float *out, const float *x, float own, size_t count, const float *const *r,
                  const float *w) {
    for (size_t at = 0; at < n; at += PIECE) {
        size_t some = n - at < PIECE ? n - at : PIECE, done = count < 4 ? count : 4;
        few(some, out + at, x + at, own, done, r, w, at);
        for (; done < count; done += 4)
            few(some, out + at, out + at, 1.0f, count - done < 4 ? count - done : 4, r + done, w + done, at);
    }
}

/* The weighted sums of all rows of x [rows, width], in the columns [from, to): row i of out is own[i] x_i plus the sum
   of w[k] x_sources[k] over k in [starts[i], starts[i + 1]). Works on `tile` columns of all rows at a time, which
   stay in a cache. */
void weighted_rows(size_t rows, size_t width, size_t from, size_t to, size_t tile, float *out, const float *x,
                   const float *own, const size_t *starts, const size_t *sources, const float *w) {
    for (size_t at = from; at < to; at += tile) {
        size_t some = to - at < tile ? to - at : tile;
        for (size_t i = 0; i < rows; i++) {
            float *row = out + i * width + at;
            const float *from_row = x + i * width + at;
            float scale = own[i];
            size_t k = starts[i], end = starts[i + 1];
            do {
                const float *r[4];
                size_t count = end - k < 4 ? end - k : 4;
                for (size_t j = 0; j < count; j++)
                    r[j] = x + sources[k + j] * width + at;
                few(some, row, from_row, scale, count, r, w + k, 0);
                from_row = row, scale = 1.0f, k += count;
            } while (k < end);
        }
    }
}
