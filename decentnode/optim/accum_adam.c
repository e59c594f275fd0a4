/* AccumAdam's step inside a window, and at the end of one (optim/accum_adam.py). */
#include <math.h>
#include <stddef.h>

struct constants { float sign, l2, shrink, new1, keep2, new2, step, root, eps, share; };

#define UPDATE                                                                   \
    float gradient = c.sign * g[i] + c.l2 * x[i];                                \
    float first = m[i] + c.new1 * (gradient - m[i]);                             \
    float second = c.keep2 * v[i] + c.new2 * gradient * gradient;                \
    float total = sum[i] + c.share * gradient;                                   \
    x[i] = c.shrink * x[i] - c.step * first / (c.root * sqrtf(second) + c.eps);

void inside(size_t n, float *restrict x, const float *restrict g, float *restrict m, float *restrict v,
            float *restrict sum, const struct constants *constants) {
    struct constants c = *constants;
    for (size_t i = 0; i < n; i++) {
        UPDATE
        sum[i] = total;
    }
}

void last(size_t n, float *restrict x, const float *restrict g, float *restrict m, float *restrict v,
          float *restrict sum, const struct constants *constants) {
    struct constants c = *constants;
    for (size_t i = 0; i < n; i++) {
        UPDATE
        m[i] = m[i] + c.new1 * (total - m[i]);
        v[i] = c.keep2 * v[i] + c.new2 * total * total;
        sum[i] = 0;
    }
}
