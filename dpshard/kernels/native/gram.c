/* Ghost norms of products of rows and columns, by Gram matrices of which only tiles exist; see dpshard/kernels/native/gram.py.

The squared norm of sum_t r_t (x) c_t is the sum over all t and s of <r_t, r_s> <c_t, c_s>. Positions are cut into
blocks. A pair of blocks i >= j is a piece of work for one thread: both Gram matrices of it, which stay in its cache,
and the sum of their product, which counts twice if i > j. Within a matrix the vectors of a block are packed, element
by element, 16 positions side by side; a tile of so many columns, and as many rows as registers hold, is summed over a
chunk of elements. On the diagonal only tiles that meet it, or lie below it, are made: half of the products.

What is summed in which order does not depend on the number of threads. */

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"
#include "tiles.h"

#define BLOCK 128 /* positions, at most */
#define CHUNK 128 /* elements that are packed at a time */

/* Vectors [B, G, T, n] of any strides. */
typedef struct {
    const float *x;
    ptrdiff_t b, g, t, k, n; /* strides in elements, and the length */
    float hidden; /* what underflow may hide of their inner products: see [Note: Underflow] */
} Vectors;

typedef float Packed[BLOCK / LANES][CHUNK][LANES];
typedef float Gram[BLOCK][BLOCK];

/* Adds the inner products of `rows` positions, packed at `a`, and LANES positions at `b`, to `gram`, if `more`; else it
starts from zero. Long sums are taken chunk by chunk, so that rounding does not grow with them. */
typedef void (*Tile)(float *gram, const float *a, const float *b, ptrdiff_t k, int more);

#define TILE(name, features, vector, broadcast, multiply_add, ROWS)                                   \
    __attribute__((target(features)))                                                                 \
    static void name(float *gram, const float *a, const float *b, ptrdiff_t k, int more)              \
    {                                                                                                 \
        enum { WIDTH = sizeof(vector) / sizeof(float), PARTS = LANES / WIDTH };                       \
        vector sums[ROWS][PARTS], of_b[PARTS];                                                        \
                                                                                                      \
        for (int r = 0; r < ROWS; r++)                                                                \
            for (int p = 0; p < PARTS; p++)                                                           \
                sums[r][p] = (vector){0};                                                             \
        for (; k > 0; k--, a += LANES, b += LANES) {                                                  \
            for (int p = 0; p < PARTS; p++)                                                           \
                of_b[p] = *(const vector *)(b + p * WIDTH);                                           \
            for (int r = 0; r < ROWS; r++)                                                            \
                for (int p = 0; p < PARTS; p++)                                                       \
                    sums[r][p] = multiply_add(broadcast(a[r]), of_b[p], sums[r][p]);                  \
        }                                                                                             \
        for (int r = 0; r < ROWS; r++)                                                                \
            for (int p = 0; p < PARTS; p++) {                                                         \
                vector *to = (vector *)(gram + r * BLOCK + p * WIDTH);                                \
                                                                                                      \
                if (more)                                                                             \
                    sums[r][p] += *to;                                                                \
                *to = sums[r][p];                                                                     \
            }                                                                                         \
    }

TILES(narrow_tile, broad_tile)

/* `k` elements of `n` positions, from `x` on; what is left of the last LANES positions is zeros. */
FOR_EVERY_PROCESSOR
static void pack(Packed packed, const float *restrict x, ptrdiff_t dt, ptrdiff_t dk, ptrdiff_t n, ptrdiff_t k)
{
    for (ptrdiff_t t = 0; t < n; t += LANES, x += LANES * dt) {
        float(*restrict to)[LANES] = packed[t / LANES];

        if (n - t < LANES) {
            memset(to, 0, sizeof *to * k);
            for (ptrdiff_t i = 0; i < k; i++)
                for (ptrdiff_t l = 0; l < n - t; l++)
                    to[i][l] = x[l * dt + i * dk];
        } else
            for (ptrdiff_t i = 0; i < k; i++)
                for (ptrdiff_t l = 0; l < LANES; l++)
                    to[i][l] = x[l * dt + i * dk];
    }
}

/* The Gram matrix of two blocks, of m positions at `a` and n at `b`. If they are `one`, it leaves out what lies above
the diagonal, and adds what underflow may hide to the diagonal. */
static void multiply(Gram gram, Tile tile, int rows, const Vectors *of, const float *a, ptrdiff_t m, const float *b,
                     ptrdiff_t n, int one)
{
    static __thread Packed at_a __attribute__((aligned(64))), at_b __attribute__((aligned(64)));
    const float(*right)[CHUNK][LANES] = one ? at_a : at_b;

    for (ptrdiff_t start = 0; start < of->n; start += CHUNK) {
        ptrdiff_t k = of->n - start < CHUNK ? of->n - start : CHUNK;

        pack(at_a, a + start * of->k, of->t, of->k, m, k);
        if (!one)
            pack(at_b, b + start * of->k, of->t, of->k, n, k);
        for (ptrdiff_t s = 0; s < n; s += LANES)
            for (ptrdiff_t t = one ? s : 0; t < m; t += rows)
                tile(&gram[t][s], at_a[t / LANES][0] + t % LANES, right[s / LANES][0], k, start > 0);
    }
    for (ptrdiff_t t = 0; one && t < m; t++)
        gram[t][t] += of->hidden;
}

typedef struct {
    double product, roots;
} Sums;

/* What a pair of blocks adds to the squared norm; and the roots of products of the diagonals, if the blocks are one. */
FOR_EVERY_PROCESSOR
static void add_up(Gram of_rows, Gram of_cols, ptrdiff_t m, ptrdiff_t n, int one, Sums *sums)
{
    Sums found = {0, 0};

    for (ptrdiff_t t = 0; t < m; t++) {
        const float *restrict a = of_rows[t], *restrict b = of_cols[t];
        /* A tile on the diagonal has both halves of it; others stand for two. */
        ptrdiff_t whole = one ? t / LANES * LANES : n;
        float sum[LANES] = {0};

        for (ptrdiff_t s = 0; s < whole; s += LANES)
            for (int l = 0; l < LANES; l++)
                sum[l] += 2 * (a[s + l] * b[s + l]); /* 2 * a may overflow where the product does not */
        if (one) {
            for (int l = 0; l < LANES; l++)
                sum[l] += a[whole + l] * b[whole + l];
            found.roots += sqrt((double)a[t] * b[t]);
        }
        for (int l = 0; l < LANES; l++)
            found.product += sum[l];
    }
    *sums = found;
}

typedef struct {
    Vectors rows, cols;
    ptrdiff_t G, T, size, pairs; /* positions of a block; pairs of blocks */
    ptrdiff_t pieces, taken;
    Sums *sums; /* of every piece */
    Tile tile;
    int tile_rows;
} Ghost;

static void take_norms(void *job)
{
    static __thread Gram of_rows __attribute__((aligned(64))), of_cols __attribute__((aligned(64)));
    Ghost *ghost = job;
    ptrdiff_t piece;

    while ((piece = __atomic_fetch_add(&ghost->taken, 1, __ATOMIC_RELAXED)) < ghost->pieces) {
        ptrdiff_t sample = piece / ghost->pairs / ghost->G, group = piece / ghost->pairs % ghost->G;
        ptrdiff_t i = 0, j = piece % ghost->pairs, m, n;

        while (j > i)
            j -= ++i;
        i *= ghost->size, j *= ghost->size;
        m = ghost->T - i < ghost->size ? ghost->T - i : ghost->size;
        n = ghost->T - j < ghost->size ? ghost->T - j : ghost->size;
        for (int which = 0; which < 2; which++) {
            const Vectors *of = which ? &ghost->cols : &ghost->rows;
            const float *x = of->x + sample * of->b + group * of->g;

            multiply(which ? of_cols : of_rows, ghost->tile, ghost->tile_rows, of, x + i * of->t, m, x + j * of->t, n,
                     i == j);
        }
        add_up(of_rows, of_cols, m, n, i == j, &ghost->sums[piece]);
    }
}

/* See dpshard/kernels/underflow.py. */
static double hidden(double terms)
{
    return 8 * terms * FLT_MIN;
}

/* Upper bounds [B] of the squared norms of sum_t rows_t (x) cols_t over all groups; a group adds at least
`relative_floor` times (sum_t |rows_t| |cols_t|)^2. Rows [B, G, T, R] and cols [B, G, T, C] have strides; `sizes` are B, G, T, R, C, all
positive. False if there is no memory. For processors that have tiles. */
int dpshard_ghost_norms(Team team, unsigned threads, const float *rows, const ptrdiff_t strides_of_rows[4],
                        const float *cols, const ptrdiff_t strides_of_cols[4], const ptrdiff_t sizes[5],
                        double relative_floor, float *norms)
{
    const ptrdiff_t *r = strides_of_rows, *c = strides_of_cols, B = sizes[0], G = sizes[1], T = sizes[2];
    ptrdiff_t blocks = (T + BLOCK - 1) / BLOCK, pairs = blocks * (blocks + 1) / 2;
    ptrdiff_t size = ((T + blocks - 1) / blocks + LANES - 1) / LANES * LANES;
    Ghost ghost = {
        .rows = {rows, r[0], r[1], r[2], r[3], sizes[3], (float)hidden((double)T * sizes[3])},
        .cols = {cols, c[0], c[1], c[2], c[3], sizes[4], (float)hidden((double)T * sizes[4])},
        .G = G, .T = T, .size = size, .pairs = pairs, .pieces = B * G * pairs,
        .sums = malloc(sizeof(Sums) * B * G * pairs),
        .tile = WHICH_TILE(narrow_tile, broad_tile), .tile_rows = tile_rows(),
    };

    if (ghost.sums == NULL)
        return 0;
    share(team, threads, take_norms, &ghost, ghost.pieces);
    for (ptrdiff_t b = 0; b < B; b++) {
        double total = hidden((double)G * T * T);

        for (ptrdiff_t group = b * G; group < (b + 1) * G; group++) {
            double product = 0, roots = 0, least;

            for (ptrdiff_t piece = group * pairs; piece < (group + 1) * pairs; piece++) {
                product += ghost.sums[piece].product;
                roots += ghost.sums[piece].roots;
            }
            /* A product of sums may be infinite and negative, where sums of squares are finite. NaN stays NaN. */
            product = fabs(product), least = relative_floor * roots * roots;
            total += product < least ? least : product;
        }
        norms[b] = (float)total;
    }
    free(ghost.sums);
    return 1;
}
