/* The stream of randomness.RandomSource under a key: AES-256 in the counter mode of GCM with a nonce of zeros, by the
instructions that x86-64 has for it. They take the same time for all keys and words. FIPS 197; NIST SP 800-38D. */

#include <stddef.h>
#include <stdint.h>

#define ROUNDS 14
#define KEY 32 /* bytes */

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WITH_CIPHER __attribute__((target("aes,sse4.1")))
#define AT_ONCE 8 /* blocks that hide each other's latency */

static inline int has_cipher(void)
{
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("sse4.1");
}

/* Each word of a round key adds the word before to that of two round keys before. */
WITH_CIPHER
static inline __m128i next_round_key(__m128i key, __m128i added)
{
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, added);
}

#define NEXT_TWO(i, constant)                                                                                    \
    keys[i] = next_round_key(keys[i - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[i - 1], constant), 0xff)); \
    keys[i + 1] = next_round_key(keys[i - 1], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[i], 0), 0xaa))

WITH_CIPHER
static inline void expand(const uint8_t *key, __m128i *keys)
{
    keys[0] = _mm_loadu_si128((const __m128i *)key);
    keys[1] = _mm_loadu_si128((const __m128i *)(key + 16));
    NEXT_TWO(2, 0x01);
    NEXT_TWO(4, 0x02);
    NEXT_TWO(6, 0x04);
    NEXT_TWO(8, 0x08);
    NEXT_TWO(10, 0x10);
    NEXT_TWO(12, 0x20);
    keys[14] = next_round_key(keys[12], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[13], 0x40), 0xff));
}

/* Write the blocks of 16 bytes [first, first + count) of the stream under `keys`. */
WITH_CIPHER
static inline void write_stream(const __m128i *keys, uint32_t first, ptrdiff_t count, uint8_t *out)
{
    for (ptrdiff_t done = 0; done < count; done += AT_ONCE) {
        ptrdiff_t n = count - done < AT_ONCE ? count - done : AT_ONCE;
        __m128i blocks[AT_ONCE];

        for (int i = 0; i < AT_ONCE; i++) /* GCM keeps the first counter for its tag */
            blocks[i] = _mm_xor_si128(
                keys[0], _mm_insert_epi32(_mm_setzero_si128(),
                                          (int)__builtin_bswap32(first + (uint32_t)(done + i) + 2), 3));
        for (int round = 1; round < ROUNDS; round++)
            for (int i = 0; i < AT_ONCE; i++)
                blocks[i] = _mm_aesenc_si128(blocks[i], keys[round]);
        for (int i = 0; i < AT_ONCE; i++)
            blocks[i] = _mm_aesenclast_si128(blocks[i], keys[ROUNDS]);
        for (ptrdiff_t i = 0; i < n; i++)
            _mm_storeu_si128((__m128i *)(out + 16 * (done + i)), blocks[i]);
    }
}

/* Write the blocks of 16 bytes [first, first + count) of the stream under `key`. */
WITH_CIPHER
static inline void stream_of(const uint8_t *key, uint32_t first, ptrdiff_t count, uint8_t *out)
{
    __m128i keys[ROUNDS + 1];

    expand(key, keys);
    write_stream(keys, first, count, out);
}
#else
static inline int has_cipher(void)
{
    return 0;
}

static inline void stream_of(const uint8_t *key, uint32_t first, ptrdiff_t count, uint8_t *out)
{
    (void)key, (void)first, (void)count, (void)out;
}
#endif
