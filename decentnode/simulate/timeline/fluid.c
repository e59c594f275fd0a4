/* Simulates flows on shared resources from event to event, with the same operations as fair.py and fluid.py in NumPy,
   so that the results are bit-identical. A flow with fewer resources than others is given the last resource, whose
   capacity is infinite. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct problem {
    size_t flows, each, resources, sets;
    size_t exact_flows;
    double coarse, equal, until, later;
    const int64_t *uses;    /* [flows][each] */
    const double *capacity; /* [resources] */
    const double *most;     /* [flows] */
    const double *begin;    /* [flows] */
    const size_t *first;    /* [sets + 1], where the flows of each set begin in `alive` */
    size_t *alive;          /* [flows] by set, ascending */
    double *left;           /* [flows] */
    double *ends;           /* [flows] infinite */
    double *clock;          /* [sets] */
    double bound;           /* the time up to which flows were simulated */
};

struct scratch {
    double *left, *share, *least, *passing, *rate, *last, *sorted;
    size_t *used, *under_way, *open, *fixed;
    char *seen;
};

#define EACH(r, flow) for (const int64_t *r = p->uses + (flow) * p->each, *r##_end = r + p->each; r < r##_end; r++)

/* Computes the max-min fair rates of the flows in flight (fair.fair_rates). */
static void fair_rates(const struct problem *p, const struct scratch *s, size_t count) {
    size_t used = 0, open = count;
    for (size_t i = 0; i < count; i++) {
        s->open[i] = s->under_way[i];
        EACH(r, s->open[i]) if (!s->seen[*r]) {
            s->seen[*r] = 1;
            s->left[*r] = p->capacity[*r];
            s->used[used++] = *r;
        }
    }
    while (open) {
        for (size_t k = 0; k < used; k++) s->share[s->used[k]] = 0;
        for (size_t i = 0; i < open; i++) EACH(r, s->open[i]) s->share[*r] += 1;
        size_t in_use = 0;
        for (size_t k = 0; k < used; k++) {
            size_t r = s->used[k];
            if (s->share[r] == 0) continue;
            s->share[r] = s->left[r] / s->share[r];
            s->least[r] = INFINITY;
            s->used[in_use++] = r;
        }
        used = in_use;
        for (size_t i = 0; i < open; i++) {
            double limit = p->most[s->open[i]];
            EACH(r, s->open[i]) if (s->share[*r] < limit) limit = s->share[*r];
            EACH(r, s->open[i]) if (limit < s->least[*r]) s->least[*r] = limit;
            s->rate[s->open[i]] = limit;
        }
        size_t rest = 0, fixed = 0;
        for (size_t i = 0; i < open; i++) {
            size_t flow = s->open[i];
            double limit = s->rate[flow];
            int is_final = limit >= p->most[flow] * (1 - p->equal) || isinf(limit);
            EACH(r, flow) is_final |= s->least[*r] >= s->share[*r] * (1 - p->equal) && !isinf(s->share[*r]);
            if (is_final) s->fixed[fixed++] = flow;
            else s->open[rest++] = flow;
        }
        open = rest;
        /* Column by column, as NumPy does: in another order the last digits would differ. */
        for (size_t column = 0; column < p->each; column++) {
            for (size_t k = 0; k < used; k++) s->passing[s->used[k]] = 0;
            for (size_t k = 0; k < fixed; k++) {
                double rate = s->rate[s->fixed[k]];
                if (!isinf(rate)) s->passing[p->uses[s->fixed[k] * p->each + column]] += rate;
            }
            for (size_t k = 0; k < used; k++) s->left[s->used[k]] -= s->passing[s->used[k]];
        }
        for (size_t k = 0; k < used; k++)
            if (s->left[s->used[k]] < 0) s->left[s->used[k]] = 0;
    }
    for (size_t i = 0; i < count; i++) EACH(r, s->under_way[i]) s->seen[*r] = 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns until when the rates of a set stay constant. Sets `count` to the number of its flows in flight, and their
   rates and remaining seconds in scratch. */
static double next(const struct problem *p, const struct scratch *s, size_t set, size_t alive, size_t *count) {
    double now = p->clock[set], begins = INFINITY, soonest = INFINITY;
    *count = 0;
    for (size_t i = p->first[set]; i < p->first[set] + alive; i++) {
        size_t flow = p->alive[i];
        if (p->begin[flow] <= now + p->equal * (1 + fabs(now))) s->under_way[(*count)++] = flow;
        else if (p->begin[flow] < begins) begins = p->begin[flow];
    }
    fair_rates(p, s, *count);
    for (size_t i = 0; i < *count; i++) {
        size_t flow = s->under_way[i];
        s->last[flow] = s->sorted[i] = isinf(s->rate[flow]) ? 0.0 : p->left[flow] / s->rate[flow];
        if (s->last[flow] < soonest) soonest = s->last[flow];
    }
    double target = now + soonest < begins ? now + soonest : begins;
    if (*count > p->exact_flows) {
        qsort(s->sorted, *count, sizeof(double), ascending);
        size_t some = (size_t)ceil(p->coarse * (double)*count), half = (size_t)ceil(0.5 * (double)*count);
        double seconds = fmin(s->sorted[some ? some - 1 : 0], fmax(soonest, p->coarse * s->sorted[half - 1]));
        target = now + seconds;
        if (begins < target) target = fmax(begins, now + p->coarse * seconds);
    }
    return target;
}

/* Advances the flows in flight to `target`. Returns the number of the set's flows that have not ended. */
static size_t pass(const struct problem *p, const struct scratch *s, size_t set, size_t alive, size_t count,
                   double target) {
    double now = p->clock[set], step = target - now;
    for (size_t i = 0; i < count; i++) {
        size_t flow = s->under_way[i];
        double last = s->last[flow];
        if (last <= step * (1 + p->equal) + 1e-15 || now + last <= target) {
            p->ends[flow] = now + last;
            p->left[flow] = 0;
        } else {
            double left = p->left[flow] - s->rate[flow] * step;
            p->left[flow] = left > 0 ? left : 0;
        }
    }
    p->clock[set] = target;
    size_t rest = 0, *flows = p->alive + p->first[set];
    for (size_t i = 0; i < alive; i++)
        if (isinf(p->ends[flows[i]])) flows[rest++] = flows[i];
    return rest;
}

/* Allocates the scratch memory. Returns whether there was enough. */
static int prepared(const struct problem *p, struct scratch *s) {
    size_t f = p->flows, r = p->resources;
    double *d = malloc((4 * r + 3 * f) * sizeof(double));
    size_t *n = malloc((r + 3 * f) * sizeof(size_t));
    char *seen = calloc(r, 1);
    *s = (struct scratch){d, d + r, d + 2 * r, d + 3 * r, d + 4 * r, d + 4 * r + f, d + 4 * r + 2 * f,
                          n, n + r, n + r + f, n + r + 2 * f, seen};
    return d && n && seen;
}

static void done(struct scratch *s) {
    free(s->left);
    free(s->used);
    free(s->seen);
}

/* Writes the max-min fair rates of all flows to `ends`. Returns 0, or 1 if memory is exhausted. */
int rates(struct problem *p) {
    struct scratch s;
    int failed = !prepared(p, &s);
    if (!failed) {
        for (size_t i = 0; i < p->flows; i++) s.under_way[i] = i;
        fair_rates(p, &s, p->flows);
        for (size_t i = 0; i < p->flows; i++) p->ends[i] = s.rate[i];
    }
    done(&s);
    return failed;
}

/* Simulates flows (_simulate_sets of fluid.py). Returns 0, or 1 if memory is exhausted. */
int follow(struct problem *p) {
    struct scratch s;
    int failed = !prepared(p, &s);
    if (!failed) {
        size_t count;
        double first = p->later;
        for (size_t set = 0; set < p->sets; set++) {
            double target = next(p, &s, set, p->first[set + 1] - p->first[set], &count);
            if (target < first) first = target;
        }
        p->bound = fmax(p->until, first);
        for (size_t set = 0; set < p->sets; set++) {
            size_t alive = p->first[set + 1] - p->first[set];
            do {
                double target = fmin(next(p, &s, set, alive, &count), p->bound);
                alive = pass(p, &s, set, alive, count, target);
            } while (alive && p->clock[set] < p->bound);
        }
    }
    done(&s);
    return failed;
}

/* Sets `lowest` to the lowest vertex of the connected component of each of `count` vertices, with edges a - b. */
void join(size_t count, size_t edges, const int64_t *a, const int64_t *b, int64_t *lowest) {
    for (size_t i = 0; i < count; i++) lowest[i] = (int64_t)i;
    for (size_t k = 0; k < edges; k++) {
        int64_t x = a[k], y = b[k];
        while (lowest[x] != x) x = lowest[x] = lowest[lowest[x]];
        while (lowest[y] != y) y = lowest[y] = lowest[lowest[y]];
        if (x < y) lowest[y] = x;
        else lowest[x] = y;
    }
    for (size_t i = 0; i < count; i++) lowest[i] = lowest[lowest[i]]; /* that of lower vertices is final already */
}
