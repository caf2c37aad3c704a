/* Tiles: matrices of sums that stay in eight vector registers, of ROWS rows of LANES numbers. A tile is compiled for
every kind of registers that x86-64 has for it, by a macro TILE(name, features, vector, broadcast, multiply_add, ROWS)
of the file that includes this one. */

#define LANES 16

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TILES(narrow, broad)                                                   \
    TILE(narrow, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, 4)       \
    TILE(broad, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, 8)
#define BROADEST "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps
#define WHICH_TILE(narrow, broad) (tile_rows() == 8 ? broad : narrow)
#else
#define TILES(narrow, broad)
#define WHICH_TILE(narrow, broad) NULL
#endif

/* ROWS of the tiles that run on this processor; 0 if none does. */
static inline int tile_rows(void)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512f"))
        return 8;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 4;
#endif
    return 0;
}
