/*
 * A random next token: a thread block of 1024 threads per sequence.
 *
 * Probabilities are fixed-point numbers, exp((logit - largest) / temperature) * 2^40 rounded down,
 * so sums do not depend on the order of additions. A candidate at a place of the order by logit is
 * found by bisection over the bits of the logit: the sum over all candidates from a logit on. Few
 * candidates have nearly all of the probability; if they are enough, the bisection runs over a list
 * of them in shared memory, otherwise over all logits.
 *
 *   smem     [ list of up to 4096 candidates: logits as ordered integers, ids ]
 *   Traffic  the logits three times; without a list up to 100 times, from L2
 */
#include "kernels/cuda/common/device.h"
#include "kernels/cuda/decoder/decoder.h"
#include "kernels/cuda/decoder/reduce.cuh"

enum { SAMPLE_THREADS = 1024, SAMPLE_LIST = 4096, SAMPLE_LEVELS = 5 };

typedef unsigned long long sample_mass;

struct sampler {
    const float *logits;
    int vocab;
    float top, per_temperature;
    const uint32_t *keys; /* of the list */
    const int *ids;
    int listed; /* candidates of the list; -1: all logits */
    sample_mass *parts;
};

/* Integers in the order of the logits; 0 for a NaN, which has no probability. */
static __device__ __forceinline__ uint32_t sample_key(float v)
{
    const uint32_t bits = __float_as_uint(v);
    return isnan(v) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float sample_value(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

static __device__ __forceinline__ sample_mass mass_of(const sampler &s, uint32_t key)
{
    return key ? (sample_mass)(__expf((sample_value(key) - s.top) * s.per_temperature) * 0x1p40f)
               : 0;
}

/* The sum over the thread block, in all threads. */
static __device__ __forceinline__ sample_mass mass_sum(sample_mass v, sample_mass *parts)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = parts[threadIdx.x % 32];
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    return v;
}

static __device__ __forceinline__ int sample_count(const sampler &s)
{
    return s.listed < 0 ? s.vocab : s.listed;
}

static __device__ __forceinline__ uint32_t key_at(const sampler &s, int i)
{
    return s.listed < 0 ? sample_key(s.logits[i]) : s.keys[i];
}

/* The sum of the probabilities, or the number, of the candidates from `key` on. */
static __device__ sample_mass sum_from(const sampler &s, uint32_t key, bool number)
{
    sample_mass sum = 0;
    for (int i = (int)threadIdx.x; i < sample_count(s); i += SAMPLE_THREADS) {
        const uint32_t own = key_at(s, i);
        if (own >= key)
            sum += number ? 1 : mass_of(s, own);
    }
    return mass_sum(sum, s.parts);
}

/* The largest key whose sum is at least `target`, which must be within 1 and the sum of all. */
static __device__ uint32_t find_key(const sampler &s, sample_mass target, bool number)
{
    uint32_t key = 0;
#pragma unroll 1
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (sum_from(s, key | bit, number) >= target)
            key |= bit;
    return key;
}

/* SplitMix64 of seed, stream and index, as in qt_sample. */
static __device__ __forceinline__ double sample_uniform(sample_mass seed, sample_mass stream,
                                                        sample_mass index)
{
    sample_mass z = seed;
    for (int i = 0; i < 2; i++) {
        z += 0x9e3779b97f4a7c15ull * ((i ? index : stream) + 1);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return (double)(z >> 11) * 0x1p-53;
}

/* Number `rank` of the candidates with this key, by ascending id. */
static __device__ int id_of(const sampler &s, uint32_t key, sample_mass rank)
{
    __shared__ int least;
    int last = -1;
    for (sample_mass n = 0; n <= rank; n++) {
        __syncthreads();
        if (threadIdx.x == 0)
            least = 0x7fffffff;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < sample_count(s); i += SAMPLE_THREADS) {
            const int id = s.listed < 0 ? i : s.ids[i];
            if (key_at(s, i) == key && id > last)
                atomicMin(&least, id);
        }
        __syncthreads();
        last = least;
    }
    return last;
}

static __device__ __forceinline__ sample_mass part_of_mass(double part, sample_mass sum)
{
    const sample_mass target = (sample_mass)ceil(part * (double)sum);
    return target < 1 ? 1 : target > sum ? sum : target;
}

static __global__ void __launch_bounds__(SAMPLE_THREADS) sample_kernel(qtool_decoder_next a)
{
    __shared__ sample_mass parts[32];
    __shared__ uint32_t keys[SAMPLE_LIST];
    __shared__ int ids[SAMPLE_LIST], listed;
    __shared__ uint32_t top_key;
    const int sequence = (int)blockIdx.x, vocab = (int)a.vocab;
    float *logits = a.logits + (size_t)sequence * vocab;
    bool finite = true;
    ptx_launch_dependents();
    if (threadIdx.x == 0)
        top_key = listed = 0;
    __syncthreads();
    ptx_wait_previous();
    uint32_t most = 0;
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < vocab; i += SAMPLE_THREADS) {
        const float v = changed_logit(a, (size_t)sequence * vocab + i, i);
        logits[i] = v;
        finite &= isfinite(v);
        most = max(most, sample_key(v));
    }
    atomicMax(&top_key, most);
    if (a.fault && !finite)
        *a.fault = 1;
    __syncthreads();
    sampler s = {logits, vocab, sample_value(top_key), 1 / a.temperature, keys, ids, -1, parts};

    /* Candidates within `level` temperatures of the largest logit. */
    const float level[SAMPLE_LEVELS] = {2, 4, 7, 12, 30};
    sample_mass mass[SAMPLE_LEVELS] = {}, number[SAMPLE_LEVELS] = {};
    for (int i = (int)threadIdx.x; i < vocab; i += SAMPLE_THREADS) {
        const uint32_t key = sample_key(logits[i]);
        const sample_mass own = mass_of(s, key);
        const float below = (s.top - logits[i]) * s.per_temperature;
#pragma unroll
        for (int j = 0; j < SAMPLE_LEVELS; j++)
            if (j == SAMPLE_LEVELS - 1 || below <= level[j]) {
                mass[j] += own;
                number[j]++;
            }
    }
#pragma unroll
    for (int j = 0; j < SAMPLE_LEVELS; j++) {
        mass[j] = mass_sum(mass[j], parts);
        number[j] = mass_sum(number[j], parts);
    }
    const double uniform =
        sample_uniform(a.seed, (sample_mass)sequence, (sample_mass)a.position[sequence] + 1);
    const sample_mass all = mass[SAMPLE_LEVELS - 1];
    const sample_mass top_k = a.top_k && a.top_k < (size_t)vocab ? a.top_k : 0;
    const bool nucleus = a.top_p < 1;
    const sample_mass need =
        nucleus ? part_of_mass(a.top_p, all) : (sample_mass)(uniform * (double)all) + 1;
    float reach = -1; /* of the smallest level that is enough */
#pragma unroll
    for (int j = SAMPLE_LEVELS - 2; j >= 0; j--)
        if ((top_k ? number[j] >= top_k : mass[j] >= need) && number[j] <= SAMPLE_LIST)
            reach = level[j];
    if (reach > 0) {
        for (int i = (int)threadIdx.x; i < vocab; i += SAMPLE_THREADS)
            if ((s.top - logits[i]) * s.per_temperature <= reach) {
                const int at = atomicAdd(&listed, 1);
                keys[at] = sample_key(logits[i]);
                ids[at] = i;
            }
        __syncthreads();
        s.listed = listed;
    }

    sample_mass kept = all;
    if (top_k) {
        const uint32_t key = find_key(s, top_k, true);
        const sample_mass above = sum_from(s, key + 1, false), over = sum_from(s, key + 1, true);
        kept = above + (top_k - over) * mass_of(s, key);
    }
    if (nucleus) {
        const sample_mass target = part_of_mass(a.top_p, kept);
        const uint32_t key = find_key(s, target, false);
        const sample_mass above = sum_from(s, key + 1, false), one = mass_of(s, key);
        kept = above + (target - above + one - 1) / one * one;
    }
    sample_mass at = (sample_mass)(uniform * (double)kept);
    at = at < kept ? at : kept - 1;
    const uint32_t key = find_key(s, at + 1, false);
    const sample_mass above = sum_from(s, key + 1, false);
    const int id = id_of(s, key, (at - above) / mass_of(s, key));
    if (threadIdx.x == 0) {
        const int position = a.position[sequence] + 1;
        a.ids[sequence] = id < vocab ? id : 0; /* all logits are NaN */
        a.position[sequence] = position;
        a.length[sequence] = position + 1;
        if (a.text && position < (int)a.capacity)
            a.text[(size_t)sequence * a.capacity + position] = id < vocab ? id : 0;
    }
}

int qt_decoder_sample(const struct qtool_decoder_next *a, bool dependent, void *stream)
{
    struct qtool_decoder_next args = *a;
    struct qt_kernel_launch l = {};
    if (!a->ids || !(a->temperature > 0))
        return QTOOL_UNSUPPORTED;
    l.kernel = (const void *)sample_kernel;
    l.grid = dim3((unsigned)a->sequences);
    l.threads = SAMPLE_THREADS;
    l.dependent = l.most_smem = dependent; /* products that follow need much of it */
    return qt_launch_kernel(&l, &args, stream);
}
