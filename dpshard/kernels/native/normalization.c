/* Gradients of the weights and biases of normalisation layers, sample by sample. A row, or a group of rows, is read three
times while it is in the cache (larger groups are fetched again), and nothing but the gradients is written.

Of an output y = w n + b with n = (x - mean) / sqrt(var + eps), and g its gradient, that of w is the sum of g n over all
places that have the weight in common, and that of b the sum of g. Long sums are made of shorter ones, so that they
round no worse the longer they are. */

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "team.h"

#define LANES 16
#define CHUNK 2048 /* elements of a row that are summed in single precision */
#define ROWS 32    /* rows that are */
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *x, *g;
    float *weights, *biases, *room;
    ptrdiff_t groups, N, K, pieces, taken;
    double eps;
    int centered;
} Layer;

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    double product, sum;
} Sums;

INLINE float over(Lanes lanes)
{
    float quarters[4] = {0};

    for (int l = 0; l < LANES; l++)
        quarters[l % 4] += lanes[l];
    return (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
}

/* The sums of (x - of_x) (y - of_y) and of y. */
INLINE Sums sums(const float *x, float of_x, const float *y, float of_y, ptrdiff_t n)
{
    Sums total = {0, 0};

    for (ptrdiff_t start = 0; start < n; start += CHUNK) {
        ptrdiff_t i = start, stop = start + CHUNK < n ? start + CHUNK : n;
        Lanes products = {0}, lanes = {0};
        float product = 0, sum = 0;

        for (; i + LANES <= stop; i += LANES) {
            Lanes these = *(const Lanes *)(y + i);

            products += (*(const Lanes *)(x + i) - of_x) * (these - of_y);
            lanes += these;
        }
        for (; i < stop; i++) {
            product += (x[i] - of_x) * (y[i] - of_y);
            sum += y[i];
        }
        total.product += over(products) + product;
        total.sum += over(lanes) + sum;
    }
    return total;
}

/* The mean of a row, and what its elements are multiplied by after it was subtracted. */
INLINE void moments(const Layer *layer, const float *x, ptrdiff_t n, float *mean, float *scale)
{
    *mean = layer->centered ? (float)(sums(x, 0, x, 0, n).sum / n) : 0;
    *scale = (float)(1 / sqrt(sums(x, *mean, x, *mean, n).product / n + layer->eps));
}

/* x [N, K], each row of which is normalised: weights and biases are those of the K columns. */
INLINE void of_columns(const Layer *layer, ptrdiff_t b)
{
    ptrdiff_t N = layer->N, K = layer->K;
    float *restrict weights = layer->weights + b * K, *restrict biases = layer->biases + b * K;
    float *restrict some_weights = layer->room + b * 2 * K, *restrict some_biases = some_weights + K;

    memset(weights, 0, sizeof(float) * K);
    memset(biases, 0, sizeof(float) * K);
    for (ptrdiff_t start = 0; start < N; start += ROWS) {
        memset(some_weights, 0, sizeof(float) * 2 * K);
        for (ptrdiff_t n = start; n < N && n < start + ROWS; n++) {
            const float *restrict x = layer->x + (b * N + n) * K, *restrict g = layer->g + (b * N + n) * K;
            float mean, scale;

            moments(layer, x, K, &mean, &scale);
            for (ptrdiff_t k = 0; k < K; k++) {
                some_weights[k] += g[k] * ((x[k] - mean) * scale);
                some_biases[k] += g[k];
            }
        }
        for (ptrdiff_t k = 0; k < K; k++) {
            weights[k] += some_weights[k];
            biases[k] += some_biases[k];
        }
    }
}

/* x [K, N], groups of rows of which are normalised: weights and biases are those of the K rows. */
INLINE void of_rows(const Layer *layer, ptrdiff_t piece)
{
    ptrdiff_t N = layer->N, rows = layer->K / layer->groups;
    const float *x = layer->x + piece * rows * N, *g = layer->g + piece * rows * N;
    float mean, scale;

    moments(layer, x, rows * N, &mean, &scale);
    for (ptrdiff_t k = 0; k < rows; k++) {
        Sums total = sums(x + k * N, mean, g + k * N, 0, N);

        layer->weights[piece * rows + k] = (float)(total.product * scale);
        layer->biases[piece * rows + k] = (float)total.sum;
    }
}

FOR_EVERY_PROCESSOR
static void differentiate(void *job)
{
    Layer *layer = job;
    ptrdiff_t piece;

    while ((piece = __atomic_fetch_add(&layer->taken, 1, __ATOMIC_RELAXED)) < layer->pieces)
        if (layer->groups)
            of_rows(layer, piece);
        else
            of_columns(layer, piece);
}

/* Gradients `made` [2, B, K] of weights and biases, of x and g [B, K, N], where groups of K / `groups` rows are
normalised, or of [B, N, K], where rows are, if `groups` is 0. The mean is taken to be 0 if not `centered`. `sizes` are
B, groups, N, K; the others are positive. `room` is [B, 2, K] to work in if `groups` is 0. */
void dpshard_normalization_gradients(Team team, unsigned threads, const float *x, const float *g, float *made,
                                     float *room, const ptrdiff_t sizes[4], double eps, int centered)
{
    Layer layer = {
        .x = x, .g = g, .weights = made, .biases = made + sizes[0] * sizes[3], .room = room,
        .groups = sizes[1], .N = sizes[2], .K = sizes[3], .pieces = sizes[0] * (sizes[1] ? sizes[1] : 1),
        .eps = eps, .centered = centered,
    };

    share(team, threads, differentiate, &layer, layer.pieces);
}
