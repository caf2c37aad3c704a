/* One number for each of many arrays: a sum over its bits, or its squared norm. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "team.h"

typedef struct {
    const void *x;
    ptrdiff_t n, itemsize;
} Array;

/* The sum of w + w^2 over words w, which wraps around. */
#define CHECKSUM(name, word)                                            \
    FOR_EVERY_PROCESSOR                                                 \
    static uint64_t name(const word *restrict words, ptrdiff_t n)       \
    {                                                                   \
        uint64_t sum = 0;                                               \
                                                                        \
        for (ptrdiff_t i = 0; i < n; i++)                               \
            sum += (uint64_t)(words[i] + (int64_t)words[i] * words[i]); \
        return sum;                                                     \
    }

CHECKSUM(checksum_of_shorts, int16_t)
CHECKSUM(checksum_of_words, int32_t)

#define LANES 8 /* sums side by side, added in one order on every processor */

#define NORM_SQ(name, value)                                     \
    FOR_EVERY_PROCESSOR                                          \
    static double name(const value *restrict x, ptrdiff_t n)     \
    {                                                            \
        double lanes[LANES] = {0}, sum = 0;                      \
        ptrdiff_t i = 0;                                         \
                                                                 \
        for (; i + LANES <= n; i += LANES)                       \
            for (int l = 0; l < LANES; l++)                      \
                lanes[l] += (double)x[i + l] * (double)x[i + l]; \
        for (int l = 0; i < n; i++, l++)                         \
            lanes[l] += (double)x[i] * (double)x[i];             \
        for (int l = 0; l < LANES; l++)                          \
            sum += lanes[l];                                     \
        return sum;                                              \
    }

NORM_SQ(norm_sq_of_floats, float)
NORM_SQ(norm_sq_of_doubles, double)

#define PIECE 65536 /* words that a thread takes at once */

typedef struct {
    const Array *array;
    ptrdiff_t taken;
    uint64_t *sum;
} Checking;

static void check(void *job)
{
    Checking *checking = job;
    const Array *array = checking->array;
    ptrdiff_t at, words = array->itemsize == 2 ? array->n : array->n * (array->itemsize / 4);
    uint64_t own = 0;

    while ((at = __atomic_fetch_add(&checking->taken, PIECE, __ATOMIC_RELAXED)) < words) {
        ptrdiff_t n = words - at < PIECE ? words - at : PIECE;
        own += array->itemsize == 2 ? checksum_of_shorts((const int16_t *)array->x + at, n)
                                    : checksum_of_words((const int32_t *)array->x + at, n);
    }
    __atomic_fetch_add(checking->sum, own, __ATOMIC_RELAXED);
}

/* Sums [count] over the words of `arrays` [count], of 16 bits where elements have 2 bytes, else of 32 bits. */
void dpshard_checksums(Team team, unsigned threads, const void *arrays, ptrdiff_t count, uint64_t *sums)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const Array *array = (const Array *)arrays + i;
        Checking checking = {array, 0, sums + i};
        ptrdiff_t words = array->itemsize == 2 ? array->n : array->n * (array->itemsize / 4);

        sums[i] = 0;
        share(team, threads, check, &checking, (words + PIECE - 1) / PIECE);
    }
}

typedef struct {
    const Array *arrays;
    ptrdiff_t count, taken;
    double *norms;
} Measuring;

static void measure(void *job)
{
    Measuring *measuring = job;
    ptrdiff_t i;

    while ((i = __atomic_fetch_add(&measuring->taken, 1, __ATOMIC_RELAXED)) < measuring->count) {
        const Array *array = measuring->arrays + i;
        measuring->norms[i] =
            array->itemsize == 8 ? norm_sq_of_doubles(array->x, array->n) : norm_sq_of_floats(array->x, array->n);
    }
}

/* Squared norms [count] of `arrays` [count] of floats or doubles; each is the work of one thread. */
void dpshard_norms_sq(Team team, unsigned threads, const void *arrays, ptrdiff_t count, double *norms)
{
    Measuring measuring = {arrays, count, 0, norms};

    share(team, threads, measure, &measuring, count);
}
