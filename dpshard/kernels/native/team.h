/* How work is shared among threads, and which processors it is compiled for; see [Note: Native code]. */

#include <stddef.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

/* GOMP_parallel of the OpenMP that torch runs on, or NULL for none. */
typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned);

/* Do `work` on all threads of the team; each takes pieces of the job until none is left. */
static inline void share(Team team, unsigned threads, void (*work)(void *), void *job, ptrdiff_t pieces)
{
    if (team != NULL && threads > 1 && pieces > 1)
        team(work, job, threads, 0);
    else
        work(job);
}
