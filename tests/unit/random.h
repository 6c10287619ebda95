/* Fresh random data for unit tests; QT_SEED repeats a run. */
#ifndef QT_TESTS_RANDOM_H
#define QT_TESTS_RANDOM_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t seed;

static inline void seed_init(void)
{
    const char *text = getenv("QT_SEED");
    seed = text ? strtoull(text, NULL, 10) : (uint64_t)time(NULL);
    printf("QT_SEED=%llu\n", (unsigned long long)seed);
}

static inline uint64_t random_u64(void)
{
    seed += 0x9e3779b97f4a7c15u; /* splitmix64 */
    uint64_t z = seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint32_t random_u32(void)
{
    return (uint32_t)(random_u64() >> 32);
}

/* In [0, 1). */
static inline double uniform(void)
{
    return (double)(random_u64() >> 11) * 0x1p-53;
}

static inline double normal(void)
{
    return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform());
}

#endif
