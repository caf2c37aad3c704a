/* The gradient of a convolution's kernel for every sample, [B, G * R, C, *kernel]; see dpshard/kernels/native/convolution.py.

At every position the output's gradient, of R channels, meets a window of the input, of C channels. A piece of work
for one thread is some channels of the output of one sample and group: their gradients are packed, position by
position, side by side; a tile is as many elements of the window as registers hold, each of which is read where
it lies in a padded copy of the input: no window is ever gathered. Sums of more than CHUNK positions are sums of sums,
so that rounding does not grow with them. */

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"
#include "tiles.h"

#define CHUNK 1024
#define MORE_LANES 32
#define MORE_ROWS 8
#define LINE 16 /* floats of a cache line */

typedef struct {
    const float *input, *gradient; /* [B, k, G * C, *space]; [B, k, G * R, *positions] */
    float *kernels; /* [B, G * R, C, *kernel]; NULL if the norms alone are asked for */
    ptrdiff_t k, G, R, C;
    ptrdiff_t positions[3], kernel[3], stride[3], dilation[3], space[3], padding[3];
    ptrdiff_t padded[3]; /* space with the padding of both sides */
    ptrdiff_t lanes, blocks; /* channels of the output side by side, and how often in a group */
    ptrdiff_t pieces, taken;
    double *squares; /* of every piece */
    void (*tile)(const void *, const float *, const float *, const ptrdiff_t *, float *);
    int rows, failed;
} Convolution;

static inline ptrdiff_t product(const ptrdiff_t of[3])
{
    return of[0] * of[1] * of[2];
}

/* The sums over all images and positions of `gradient`, packed, times the elements of the window at `offsets`. */
#define WINDOW(name, features, vector, broadcast, multiply_add, ROWS, WIDE)                                           \
    __attribute__((target(features)))                                                                                 \
    static void name(const void *of, const float *image, const float *gradient, const ptrdiff_t *offsets, float *out) \
    {                                                                                                                 \
        enum { WIDTH = sizeof(vector) / sizeof(float), PARTS = (WIDE) / WIDTH };                                      \
        const Convolution *c = of;                                                                                    \
        ptrdiff_t n = c->positions[2], step = c->stride[2], left = CHUNK;                                             \
        vector sums[ROWS][PARTS] = {0};                                                                               \
                                                                                                                      \
        memset(out, 0, sizeof(float) * (ROWS) * (WIDE));                                                              \
        for (ptrdiff_t i = 0; i < c->k; i++, image += c->C * product(c->padded))                                      \
            for (ptrdiff_t a = 0; a < c->positions[0]; a++)                                                           \
                for (ptrdiff_t b = 0; b < c->positions[1]; b++) {                                                     \
                    const float *line = image + (a * c->stride[0] * c->padded[1] + b * c->stride[1]) * c->padded[2];  \
                                                                                                                      \
                    for (ptrdiff_t t = 0; t < n; t++, line += step, gradient += WIDE) {                               \
                        vector of_gradient[PARTS];                                                                    \
                                                                                                                      \
                        for (int p = 0; p < PARTS; p++)                                                               \
                            of_gradient[p] = *(const vector *)(gradient + p * WIDTH);                                 \
                        for (int j = 0; j < ROWS; j++) {                                                              \
                            vector element = broadcast(line[offsets[j]]);                                             \
                                                                                                                      \
                            for (int p = 0; p < PARTS; p++)                                                           \
                                sums[j][p] = multiply_add(element, of_gradient[p], sums[j][p]);                       \
                        }                                                                                             \
                        if (--left > 0)                                                                               \
                            continue;                                                                                 \
                        for (int j = 0; j < ROWS; j++)                                                                \
                            for (int p = 0; p < PARTS; p++) {                                                         \
                                *(vector *)(out + j * (WIDE) + p * WIDTH) += sums[j][p];                              \
                                sums[j][p] = (vector){0};                                                             \
                            }                                                                                         \
                        left = CHUNK;                                                                                 \
                    }                                                                                                 \
                }                                                                                                     \
        for (int j = 0; j < ROWS; j++)                                                                                \
            for (int p = 0; p < PARTS; p++)                                                                           \
                *(vector *)(out + j * (WIDE) + p * WIDTH) += sums[j][p];                                              \
    }

#define TILE(name, features, vector, broadcast, multiply_add, ROWS)                                                   \
    WINDOW(name, features, vector, broadcast, multiply_add, ROWS, LANES)
TILES(narrow_window, broad_window)
#ifdef BROADEST
#define EXPANDED(...) WINDOW(__VA_ARGS__)
/* Two registers of channels for each element of the window that is read. */
EXPANDED(broadest_window, BROADEST, MORE_ROWS, MORE_LANES)
#endif

/* `n` channels at S positions, `lanes` side by side; what is left of them is zeros. */
FOR_EVERY_PROCESSOR
static void pack(float *restrict packed, const float *restrict gradient, ptrdiff_t lanes, ptrdiff_t n, ptrdiff_t S)
{
    if (n < lanes)
        memset(packed, 0, sizeof(float) * S * lanes);
    for (ptrdiff_t start = 0; start < S; start += LINE) /* channels may lie a page apart: read whole lines of each */
        for (ptrdiff_t l = 0; l < n; l++)
            for (ptrdiff_t t = start; t < start + LINE && t < S; t++)
                packed[t * lanes + l] = gradient[l * S + t];
}

/* Add the squares of `count` elements of the kernels of n channels, and write them, if they have a place. */
FOR_EVERY_PROCESSOR
static void unpack(float *restrict kernels, const float *restrict sums, ptrdiff_t lanes, ptrdiff_t n, ptrdiff_t size,
                   ptrdiff_t count, double *restrict squares)
{
    for (ptrdiff_t j = 0; j < count; j++)
        for (ptrdiff_t l = 0; l < lanes; l++)
            squares[l] += (double)sums[j * lanes + l] * sums[j * lanes + l];
    for (ptrdiff_t l = 0; kernels != NULL && l < n; l++)
        for (ptrdiff_t j = 0; j < count; j++)
            kernels[l * size + j] = sums[j * lanes + l];
}

/* Where the elements of a window lie in a padded sample; the last of them repeat up to whole tiles. */
static void place(ptrdiff_t *offsets, const Convolution *c, ptrdiff_t size)
{
    ptrdiff_t K = product(c->kernel);

    for (ptrdiff_t j = 0; j < size + c->rows; j++) {
        ptrdiff_t element = j < size ? j : size - 1, at = element % K;
        ptrdiff_t x = at % c->kernel[2], y = at / c->kernel[2] % c->kernel[1], z = at / c->kernel[2] / c->kernel[1];

        offsets[j] = element / K * product(c->padded) + x * c->dilation[2]
                     + (z * c->dilation[0] * c->padded[1] + y * c->dilation[1]) * c->padded[2];
    }
}

/* The images of C channels of a sample, one after the other, in `padded`, which has zeros where nothing is written. */
static void pad(float *padded, const Convolution *c, const float *input)
{
    const ptrdiff_t *n = c->space, *p = c->padding, *to = c->padded;

    for (ptrdiff_t i = 0; i < c->k; i++)
        for (ptrdiff_t channel = 0; channel < c->C; channel++)
            for (ptrdiff_t z = 0; z < n[0]; z++)
                for (ptrdiff_t y = 0; y < n[1]; y++)
                    memcpy(padded + (((i * c->C + channel) * to[0] + z + p[0]) * to[1] + y + p[1]) * to[2] + p[2],
                           input + (((i * c->G * c->C + channel) * n[0] + z) * n[1] + y) * n[2], n[2] * sizeof(float));
}

static void make_gradients(void *job)
{
    Convolution *c = job;
    ptrdiff_t S = product(c->positions), size = c->C * product(c->kernel), lanes = c->lanes, piece, last = -1;
    float *packed = aligned_alloc(64, sizeof(float) * c->k * S * lanes);
    float *padded = calloc(c->k * c->C * product(c->padded), sizeof(float));
    ptrdiff_t *offsets = malloc(sizeof(ptrdiff_t) * (size + c->rows));

    c->failed |= packed == NULL || padded == NULL || offsets == NULL;
    if (offsets != NULL)
        place(offsets, c, size);
    while (!c->failed && (piece = __atomic_fetch_add(&c->taken, 1, __ATOMIC_RELAXED)) < c->pieces) {
        ptrdiff_t sample = piece / c->blocks / c->G, group = piece / c->blocks % c->G;
        ptrdiff_t first = piece % c->blocks * lanes, n = c->R - first < lanes ? c->R - first : lanes;
        float *kernels = c->kernels ? c->kernels + ((sample * c->G + group) * c->R + first) * size : NULL;
        double squares[MORE_LANES] = {0};

        if (sample * c->G + group != last)
            pad(padded, c, c->input + (sample * c->k * c->G + group) * c->C * product(c->space));
        last = sample * c->G + group;
        for (ptrdiff_t i = 0; i < c->k; i++)
            pack(packed + i * S * lanes, c->gradient + (((sample * c->k + i) * c->G + group) * c->R + first) * S,
                 lanes, n, S);
        for (ptrdiff_t done = 0; done < size; done += c->rows) {
            float sums[MORE_ROWS * MORE_LANES] __attribute__((aligned(64)));

            c->tile(c, padded, packed, offsets + done, sums);
            unpack(kernels ? kernels + done : NULL, sums, lanes, n, size,
                   size - done < c->rows ? size - done : c->rows, squares);
        }
        c->squares[piece] = 0;
        for (ptrdiff_t l = 0; l < n; l++)
            c->squares[piece] += squares[l];
    }
    free(packed);
    free(padded);
    free(offsets);
}

/* Gradients, unless `kernels` is NULL, and their squared norms [B] of images [B, k, ...]. `sizes` are B, k, G, R, C,
and then three numbers each: positions, kernel, stride, dilation, space, padding of a side; all positive but for that.
False if there is no memory. For processors that have tiles. */
int dpshard_convolution_gradients(Team team, unsigned threads, const float *input, const float *gradient,
                                  float *kernels, float *norms, const ptrdiff_t sizes[23])
{
    ptrdiff_t B = sizes[0], R = sizes[3], blocks;
    Convolution c = {
        .input = input, .gradient = gradient, .kernels = kernels,
        .k = sizes[1], .G = sizes[2], .R = R, .C = sizes[4], .lanes = LANES,
        .tile = WHICH_TILE(narrow_window, broad_window), .rows = tile_rows(),
    };

#ifdef BROADEST
    if (tile_rows() == 8 && (R + LANES - 1) / LANES % 2 == 0) {
        c.tile = broadest_window;
        c.rows = MORE_ROWS;
        c.lanes = MORE_LANES;
    }
#endif
    c.blocks = blocks = (R + c.lanes - 1) / c.lanes;
    c.pieces = B * c.G * blocks;
    c.squares = malloc(sizeof(double) * c.pieces);
    if (c.squares == NULL)
        return 0;
    memcpy(c.positions, sizes + 5, sizeof c.positions);
    memcpy(c.kernel, sizes + 8, sizeof c.kernel);
    memcpy(c.stride, sizes + 11, sizeof c.stride);
    memcpy(c.dilation, sizes + 14, sizeof c.dilation);
    memcpy(c.space, sizes + 17, sizeof c.space);
    memcpy(c.padding, sizes + 20, sizeof c.padding);
    for (int i = 0; i < 3; i++)
        c.padded[i] = c.space[i] + 2 * c.padding[i];
    share(team, threads, make_gradients, &c, c.pieces);
    for (ptrdiff_t b = 0; b < B; b++) {
        double norm = 0;

        for (ptrdiff_t piece = b * c.G * blocks; piece < (b + 1) * c.G * blocks; piece++)
            norm += c.squares[piece];
        norms[b] = (float)(norm + FLT_MIN); /* a double can only lose something here */
    }
    free(c.squares);
    return !c.failed;
}
