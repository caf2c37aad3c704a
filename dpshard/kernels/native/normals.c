/* Box and Muller's normals of random words, and their addition to a sum; reference.py does the same in numpy.

Only operations that IEEE 754 rounds in one way are used, and compilers must not contract them: so every processor
makes the same bits of the same words. The loops have no branches, so that compilers turn them into vector code.
Functions are sums of their Taylor series, near 0, to below half a unit in the last place:

    log u = e log 2 + log m, m in [1/sqrt 2, sqrt 2), log m = 2 artanh s, s = (m - 1) / (m + 1), |s| < 0.1716
    cosine and sine of the angle to the nearest axis, at most pi / 4

The logarithm of 2 has two parts, of which e times the first is exact. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cipher.h"
#include "team.h"

#define PI 3.14159265358979323846
#define LOWER_31_BITS 0x7fffffff

static inline float log_of_float(float u)
{
    int32_t bits, e;
    float m, s, z, series;

    memcpy(&bits, &u, sizeof bits);
    e = (bits - 0x3f3504f3) >> 23; /* the bits of 1 / sqrt 2 */
    bits -= (int32_t)((uint32_t)e << 23);
    memcpy(&m, &bits, sizeof m);
    s = (m - 1.0f) / (m + 1.0f);
    z = s * s;
    series = z * (2.0f / 3 + z * (2.0f / 5 + z * (2.0f / 7 + z * (2.0f / 9 + z * (2.0f / 11)))));
    return (float)e * 0x1.62e4p-1f + (2.0f * s + (s * series + (float)e * 0x1.7f7d1cp-20f));
}

static inline double log_of_double(double u)
{
    uint64_t bits;
    int32_t e;
    double m, s, z, series;

    memcpy(&bits, &u, sizeof bits);
    e = (int32_t)((bits - 0x3fe6a09e667f3bcd + 0x3ff0000000000000) >> 52) - 1023; /* of shifts, AVX2 has unsigned ones */
    bits -= (uint64_t)(int64_t)e << 52;
    memcpy(&m, &bits, sizeof m);
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    series = 2.0 / 21 + z * (2.0 / 23);
    series = 2.0 / 17 + z * (2.0 / 19 + z * series);
    series = 2.0 / 13 + z * (2.0 / 15 + z * series);
    series = 2.0 / 9 + z * (2.0 / 11 + z * series);
    series = 2.0 / 5 + z * (2.0 / 7 + z * series);
    series = z * (2.0 / 3 + z * series);
    return (double)e * 0x1.62e42fefap-1 + (2.0 * s + (s * series + (double)e * 0x1.cf79abc9e3b3ap-40));
}

/* The axis, in quarters of a turn, that is nearest to an angle in units of 2^-32 turns, and the angle from there. */
static inline int32_t nearest_axis(int32_t angle)
{
    return (int32_t)((uint32_t)angle + 0x20000000u) >> 30;
}

static inline int32_t from_axis(int32_t angle, int32_t axis)
{
    return (int32_t)((uint32_t)angle - ((uint32_t)axis << 30));
}

/* Normals [2, n] of words [3, n], in rows that are `row` apart: 31 and 31 bits for the radius, 32 for the angle. */
FOR_EVERY_PROCESSOR
static void floats_of_unit(const int32_t *restrict words, ptrdiff_t row, float *restrict normals, ptrdiff_t n)
{
    const int32_t *restrict fine = words + row, *restrict angles = words + 2 * row;

    for (ptrdiff_t i = 0; i < n; i++) {
        float u = (float)(words[i] & LOWER_31_BITS) * 0x1p-31f
                  + ((float)(fine[i] & LOWER_31_BITS) * 0x1p-62f + 0x1p-63f);
        float radius = sqrtf(-2.0f * log_of_float(u));
        int32_t angle = angles[i];
        int32_t quarter = nearest_axis(angle), rest = from_axis(angle, quarter);
        float t = (float)rest * (float)(PI * 0x1p-31), z = t * t;
        float cosine = 1.0f / 40320 - z * (1.0f / 3628800);
        float sine = t + t * (z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880)))));
        float x, y;

        cosine = 1.0f + z * (-0.5f + z * (1.0f / 24 + z * (-1.0f / 720 + z * cosine)));
        x = quarter & 1 ? sine : cosine;
        y = quarter & 1 ? cosine : sine;
        normals[i] = radius * ((quarter + 1) & 2 ? -x : x);
        normals[n + i] = radius * (quarter & 2 ? -y : y);
    }
}

/* The same of words [4, n], in double precision: the angle has 64 bits. */
FOR_EVERY_PROCESSOR
static void doubles_of_unit(const int32_t *restrict words, ptrdiff_t row, double *restrict normals, ptrdiff_t n)
{
    const int32_t *restrict fine = words + row, *restrict angles = words + 2 * row, *restrict finer = words + 3 * row;

    for (ptrdiff_t i = 0; i < n; i++) {
        double u = (double)(words[i] & LOWER_31_BITS) * 0x1p-31
                   + ((double)(fine[i] & LOWER_31_BITS) * 0x1p-62 + 0x1p-63);
        double radius = sqrt(-2.0 * log_of_double(u));
        int32_t angle = angles[i];
        int32_t quarter = nearest_axis(angle), rest = from_axis(angle, quarter);
        double t = ((double)rest + (double)finer[i] * 0x1p-32) * (PI * 0x1p-31), z = t * t;
        double sine = 1.0 / 1307674368000 - z * (1.0 / 355687428096000);
        double cosine = 1.0 / 87178291200 - z * (1.0 / 20922789888000);
        double x, y;

        sine = -1.0 / 39916800 + z * (1.0 / 6227020800 - z * sine);
        sine = -1.0 / 5040 + z * (1.0 / 362880 + z * sine);
        sine = t + t * (z * (-1.0 / 6 + z * (1.0 / 120 + z * sine)));
        cosine = -1.0 / 3628800 + z * (1.0 / 479001600 - z * cosine);
        cosine = -1.0 / 720 + z * (1.0 / 40320 + z * cosine);
        cosine = 1.0 + z * (-0.5 + z * (1.0 / 24 + z * cosine));
        x = quarter & 1 ? sine : cosine;
        y = quarter & 1 ? cosine : sine;
        normals[i] = radius * ((quarter + 1) & 2 ? -x : x);
        normals[n + i] = radius * (quarter & 2 ? -y : y);
    }
}

/* x = (x + std * noise) / divisor; the sum with wider noise is rounded once. */
#define ADD(name, value, wide)                                                                              \
    FOR_EVERY_PROCESSOR                                                                                     \
    static void name(value *restrict x, const wide *restrict noise, ptrdiff_t n, wide std, value divisor)   \
    {                                                                                                       \
        for (ptrdiff_t i = 0; i < n; i++)                                                                   \
            x[i] = (value)((wide)x[i] + std * noise[i]) / divisor;                                          \
    }

ADD(add_floats, float, float)
ADD(add_doubles_to_floats, float, double)
ADD(add_doubles, double, double)

typedef struct {
    const int32_t *words;
    ptrdiff_t stride; /* words from one unit to the next */
    void *normals;
    ptrdiff_t units, n, taken;
    int wide;
} Making;

static void make(void *job)
{
    Making *making = job;
    ptrdiff_t unit, n = making->n;

    while ((unit = __atomic_fetch_add(&making->taken, 1, __ATOMIC_RELAXED)) < making->units) {
        const int32_t *words = making->words + unit * making->stride;
        if (making->wide)
            doubles_of_unit(words, n, (double *)making->normals + 2 * n * unit, n);
        else
            floats_of_unit(words, n, (float *)making->normals + 2 * n * unit, n);
    }
}

#define PIECE 16384

typedef struct {
    void *x;
    const void *noise;
    ptrdiff_t n, taken;
    double std, divisor;
    int x_wide, noise_wide;
} Adding;

/* Add noise to x [n] and divide; both begin at element `at`. */
static void add_noise(void *x, int x_wide, ptrdiff_t at, const void *noise, int noise_wide, ptrdiff_t from, ptrdiff_t n,
                      double std, double divisor)
{
    if (x_wide)
        add_doubles((double *)x + at, (const double *)noise + from, n, std, divisor);
    else if (noise_wide)
        add_doubles_to_floats((float *)x + at, (const double *)noise + from, n, std, (float)divisor);
    else
        add_floats((float *)x + at, (const float *)noise + from, n, (float)std, (float)divisor);
}

static void add(void *job)
{
    Adding *adding = job;
    ptrdiff_t at;

    while ((at = __atomic_fetch_add(&adding->taken, PIECE, __ATOMIC_RELAXED)) < adding->n) {
        ptrdiff_t n = adding->n - at < PIECE ? adding->n - at : PIECE;
        add_noise(adding->x, adding->x_wide, at, adding->noise, adding->noise_wide, at, n, adding->std, adding->divisor);
    }
}

#define CHUNK 1024 /* pairs of normals that a thread makes at once */

typedef struct {
    void *x;
    ptrdiff_t half, lo, end; /* x gets the normals [lo, end) of 2 * half, the second half of which completes the pairs */
} Piece;

typedef struct {
    const Piece *pieces;
    const int32_t *const *streams; /* words of each summand of each piece; NULL: they are made of `keys` */
    const uint8_t *keys;
    ptrdiff_t count, taken;
    int summands, x_wide, noise_wide;
    double std, divisor;
} Releasing;

FOR_EVERY_PROCESSOR
static void sum_up(double *restrict total, const double *restrict more, ptrdiff_t n, double scale)
{
    for (ptrdiff_t i = 0; i < n; i++)
        total[i] = (total[i] + more[i]) * scale;
}

typedef struct {
    const int32_t *words;
    ptrdiff_t row; /* from one row of words to the next */
} Words;

#define ROW (CHUNK + 12) /* a chunk may begin and end within blocks of four words */

/* Words of `n` pairs from `pair` on, of [3 or 4, half] in stream number `i`. */
static Words words_of(const Releasing *job, ptrdiff_t i, ptrdiff_t half, ptrdiff_t pair, ptrdiff_t n, int32_t *room)
{
    Words found = {room + 4, ROW};

    if (job->streams != NULL) {
        found.words = job->streams[i] + pair;
        found.row = half;
        return found;
    }
    for (int row = 0; row < 3 + job->noise_wide; row++) {
        ptrdiff_t first = row * half + pair, end = first + n;
        stream_of(job->keys + KEY * i, (uint32_t)(first / 4), (end + 3) / 4 - first / 4,
                  (uint8_t *)(room + row * ROW + 4 - first % 4));
    }
    return found;
}

typedef struct {
    double normals[2][2 * CHUNK];
    int32_t words[4 * ROW];
} Room;

/* Normals [2, n] of the pairs from `pair` on, from streams number `i` on: sums of several, with unit variance. */
static void *normals_of(const Releasing *job, ptrdiff_t i, ptrdiff_t half, ptrdiff_t pair, ptrdiff_t n, Room *room)
{
    double *total = room->normals[0], *more = room->normals[1];
    Words words = words_of(job, i, half, pair, n, room->words);

    if (!job->noise_wide) {
        floats_of_unit(words.words, words.row, (float *)total, n);
        return total;
    }
    doubles_of_unit(words.words, words.row, total, n);
    for (int k = 1; k < job->summands; k++) {
        words = words_of(job, i + k, half, pair, n, room->words);
        doubles_of_unit(words.words, words.row, more, n);
        sum_up(total, more, 2 * n, k == job->summands - 1 ? 1 / sqrt(job->summands) : 1.0);
    }
    return total;
}

static void release_piece(const Releasing *job, const Piece *piece, ptrdiff_t stream)
{
    ptrdiff_t half = piece->half, lo = piece->lo, end = piece->end;
    ptrdiff_t first = lo < half && end > half ? 0 : lo % half;
    ptrdiff_t last = lo < half && end > half ? half : first + end - lo;
    Room room;

    for (ptrdiff_t pair = first; pair < last; pair += CHUNK) {
        ptrdiff_t n = last - pair < CHUNK ? last - pair : CHUNK;
        const void *noise = normals_of(job, stream, half, pair, n, &room);
        for (int second = 0; second < 2; second++) { /* of each pair */
            ptrdiff_t start = pair + second * half, stop = start + n;
            ptrdiff_t from = start > lo ? start : lo, to = stop < end ? stop : end;
            if (from < to)
                add_noise(piece->x, job->x_wide, from - lo, noise, job->noise_wide, second * n + from - start, to - from,
                          job->std, job->divisor);
        }
    }
}

static void release_pieces(void *job)
{
    Releasing *releasing = job;
    ptrdiff_t i;

    while ((i = __atomic_fetch_add(&releasing->taken, 1, __ATOMIC_RELAXED)) < releasing->count)
        release_piece(releasing, releasing->pieces + i, i * releasing->summands);
}

/* Normals [units, 2, n], double if `wide`, else float, of words [units, 4 or 3, n]. */
void dpshard_normals(Team team, unsigned threads, const int32_t *words, ptrdiff_t stride, void *normals,
                     ptrdiff_t units, ptrdiff_t n, int wide)
{
    Making making = {words, stride, normals, units, n, 0, wide};

    share(team, threads, make, &making, units);
}

/* Turn x [n] into (x + std * noise) / divisor. Noise for double is double. */
void dpshard_release(Team team, unsigned threads, void *x, const void *noise, ptrdiff_t n, double std, double divisor,
                     int x_wide, int noise_wide)
{
    Adding adding = {x, noise, n, 0, std, divisor, x_wide, noise_wide};

    share(team, threads, add, &adding, (n + PIECE - 1) / PIECE);
}

/* Turn the x of each of `pieces` [count] into (x + std * noise) / divisor, noise from `streams` [count, summands]. */
void dpshard_release_pieces(Team team, unsigned threads, const void *pieces, const void *streams, ptrdiff_t count,
                            int summands, double std, double divisor, int x_wide, int noise_wide)
{
    Releasing releasing = {pieces, streams, NULL, count, 0, summands, x_wide, noise_wide, std, divisor};

    share(team, threads, release_pieces, &releasing, count);
}

/* The same with the streams under `keys` [count, summands]; ask dpshard_has_cipher first. */
void dpshard_release_keyed(Team team, unsigned threads, const void *pieces, const uint8_t *keys, ptrdiff_t count,
                           int summands, double std, double divisor, int x_wide, int noise_wide)
{
    Releasing releasing = {pieces, NULL, keys, count, 0, summands, x_wide, noise_wide, std, divisor};

    share(team, threads, release_pieces, &releasing, count);
}
