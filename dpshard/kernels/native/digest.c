/* A digest of the bits of an array, under secret weights: [Note: A digest of the sums] in dpshard/noise/digest.py. */

#include <stddef.h>
#include <stdint.h>

#include "team.h"

#define WIDTH 4096
#define ROWS 16 /* that a thread takes at once */

/* Sums [2] over i of words[i] * columns[lane][i]: products of 32 bits in 64, which wrap around. */
FOR_EVERY_PROCESSOR
static void sum_row(const int32_t *restrict words, const int32_t *restrict columns, ptrdiff_t n, uint64_t *restrict sums)
{
    const int32_t *restrict others = columns + WIDTH;
    uint64_t one = 0, other = 0;

    for (ptrdiff_t i = 0; i < n; i++) {
        one += (uint64_t)((int64_t)words[i] * columns[i]);
        other += (uint64_t)((int64_t)words[i] * others[i]);
    }
    sums[0] = one;
    sums[1] = other;
}

typedef struct {
    const int32_t *words, *columns;
    ptrdiff_t n, at, count, taken;
    const uint64_t *rows;
    uint64_t *sums;
} Digesting;

static void digest(void *job)
{
    Digesting *digesting = job;
    ptrdiff_t n = digesting->n, at = digesting->at, first;
    uint64_t own[2] = {0, 0}, of_row[2];

    while ((first = __atomic_fetch_add(&digesting->taken, ROWS, __ATOMIC_RELAXED)) < digesting->count) {
        ptrdiff_t end = first + ROWS < digesting->count ? first + ROWS : digesting->count;
        for (ptrdiff_t row = first; row < end; row++) {
            ptrdiff_t origin = row * WIDTH - at;
            ptrdiff_t start = origin > 0 ? origin : 0, stop = origin + WIDTH < n ? origin + WIDTH : n;
            sum_row(digesting->words + start, digesting->columns + (start - origin), stop - start, of_row);
            own[0] += digesting->rows[2 * row] * of_row[0];
            own[1] += digesting->rows[2 * row + 1] * of_row[1];
        }
    }
    __atomic_fetch_add(&digesting->sums[0], own[0], __ATOMIC_RELAXED);
    __atomic_fetch_add(&digesting->sums[1], own[1], __ATOMIC_RELAXED);
}

typedef struct {
    const int32_t *words;
    ptrdiff_t n, at; /* the first word has the place `at` in its row */
    const uint64_t *rows; /* weights [.][2] of all the rows that the words meet */
} Stretch;

/* Add the digests of `stretches` [count] to sums [2]; columns are [2][WIDTH]. */
void dpshard_digests(Team team, unsigned threads, const void *stretches, ptrdiff_t count, const int32_t *columns,
                    uint64_t *sums)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const Stretch *of = (const Stretch *)stretches + i;
        ptrdiff_t rows = (of->at + of->n + WIDTH - 1) / WIDTH;
        Digesting digesting = {of->words, columns, of->n, of->at, rows, 0, of->rows, sums};

        share(team, threads, digest, &digesting, (rows + ROWS - 1) / ROWS);
    }
}
