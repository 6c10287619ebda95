/*
 * Quantizes the keys and values of new tokens and appends them to the KV cache.
 *
 *   grid    (tokens, KV heads); one warp per thread block
 *   lane    D / 32 adjacent channels of the key and of the value
 *
 * Traffic    2 * 2 * head_dim bytes read, head_dim + 4 bytes written, per token and head
 * Reference  the same arithmetic in plain C (tests/gpu/test_kv4.c), bit for bit
 * Used by    qtool_kv_append
 */
#include "kernels/cuda/common/convert.cuh"
#include "kernels/cuda/kv4/view.h"

#include <math.h>

struct kv_append_args {
    kv_view cache;
    const void *k, *v; /* [tokens][heads][D] */
    const int *sequence, *position;
    int dim, bf16, f16_cache;
};

static __device__ __forceinline__ float kv_clamp_f16(float v)
{
    return fminf(fmaxf(v, -65504.0f), 65504.0f);
}

static __device__ __forceinline__ uint32_t kv_code(float v)
{
    return (uint32_t)fminf(fmaxf(rintf(v), 0), 15);
}

/* Returns the key codes of a lane's PER channels, 4 bits each, in the low bits. */
template <int PER>
static __device__ __forceinline__ uint32_t kv_key_codes(const float *x, const float *scale,
                                                        const float *zero)
{
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        codes |= kv_code(__fmaf_rn(x[i], __frcp_rn(scale[i]), zero[i])) << 4 * i;
    return codes;
}

/* Returns the value codes of a lane's PER channels. *param: scale and minimum of the whole head. */
template <int PER>
static __device__ __forceinline__ uint32_t kv_value_codes(const float *x, __half2 *param)
{
    float low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        low = fminf(low, __shfl_xor_sync(~0u, low, d));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, d));
    }
    __half minimum = __float2half(low), scale = __float2half(__fdiv_rn(high - low, 15));
    if (__half2float(scale) == 0)
        scale = __float2half(1);
    *param = __halves2half2(scale, minimum);
    float per = __frcp_rn(__half2float(scale));
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        codes |= kv_code(__fmul_rn(x[i] - __half2float(minimum), per)) << 4 * i;
    return codes;
}

template <int PER> static __device__ __forceinline__ void kv_put(unsigned char *to, uint32_t codes)
{
    if (PER == 4)
        *(uint16_t *)to = (uint16_t)codes;
    else
        *to = (unsigned char)codes;
}

template <int PER>
__global__ void __launch_bounds__(32) kv_append_kernel(const __grid_constant__ kv_append_args a)
{
    const int lane = (int)threadIdx.x, head = (int)blockIdx.y, sequence = a.sequence[blockIdx.x];
    const int position = a.position[blockIdx.x], channel = lane * PER;
    const size_t from = ((size_t)blockIdx.x * a.cache.heads + head) * a.dim + channel;
    const size_t row = kv_row(a.cache, kv_page(a.cache, sequence, position), head, position);
    float k[PER], v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        k[i] = qt_widen(a.bf16, ((const uint16_t *)a.k)[from + i]);
        v[i] = kv_clamp_f16(qt_widen(a.bf16, ((const uint16_t *)a.v)[from + i]));
    }
    ptx_launch_dependents();
    if (a.f16_cache) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            ((__half *)a.cache.k)[row * a.dim + channel + i] = __float2half(kv_clamp_f16(k[i]));
            ((__half *)a.cache.v)[row * a.dim + channel + i] = __float2half(v[i]);
        }
        return;
    }
    const size_t at = (row * a.dim + channel) / 2;
    const int scale_at = head * a.dim + channel;
    kv_put<PER>(a.cache.k + at,
                kv_key_codes<PER>(k, a.cache.k_scale + scale_at, a.cache.k_zero + scale_at));
    __half2 param;
    kv_put<PER>(a.cache.v + at, kv_value_codes<PER>(v, &param));
    if (lane == 0)
        a.cache.param[row] = param;
}

int qtool_kv_append(const struct qtool_kv_cache *cache, const void *k, const void *v,
                    const int *sequence, const int *position, size_t tokens, enum qtool_dtype dtype,
                    void *stream)
{
    kv_append_args a = {};
    if (qt_kv_cache_fault(cache) || tokens > 0x7fffffff || (unsigned)dtype > QTOOL_BF16)
        return QTOOL_UNSUPPORTED;
    if (tokens == 0)
        return QTOOL_OK;
    if (!k || !v || !sequence || !position)
        return QTOOL_UNSUPPORTED;
    a.cache = qt_kv_view(cache);
    a.k = k;
    a.v = v;
    a.sequence = sequence;
    a.position = position;
    a.dim = (int)cache->head_dim;
    a.bf16 = dtype == QTOOL_BF16;
    a.f16_cache = cache->format == QTOOL_KV_F16;
    dim3 grid((unsigned)tokens, (unsigned)cache->heads);
    void *args[] = {&a};
    const void *kernel = cache->head_dim == 128 ? (const void *)kv_append_kernel<4>
                                                : (const void *)kv_append_kernel<2>;
    return cudaLaunchKernel(kernel, grid, dim3(32), args, 0, (cudaStream_t)stream) == cudaSuccess
               ? QTOOL_OK
               : QTOOL_FAILED;
}

/* ---- host ----------------------------------------------------------------------------------- */

static bool aligned(const void *p)
{
    return p && ((size_t)p & 15) == 0;
}

const char *qt_kv_cache_fault(const struct qtool_kv_cache *c)
{
    if (c->head_dim != 64 && c->head_dim != 128)
        return "head_dim must be 64 or 128";
    if (c->heads == 0 || c->heads > 65535)
        return "the number of KV heads must be 1 to 65535";
    if (c->page_tokens == 0 || c->page_tokens % 16 || c->page_tokens > 1u << 30)
        return "page_tokens must be a multiple of 16, from 16 to 2^30";
    if (c->table && (c->page_tokens & (c->page_tokens - 1)))
        return "page_tokens must be a power of two with a page table";
    if (!aligned(c->k) || !aligned(c->v))
        return "k and v must be set and 16-byte aligned";
    if (c->format == QTOOL_KV_INT4 && (!aligned(c->v_param) || !c->k_scale || !c->k_zero))
        return "a 4-bit cache needs v_param (16-byte aligned), k_scale and k_zero";
    if (c->format != QTOOL_KV_INT4 && c->format != QTOOL_KV_F16)
        return "unknown cache format";
    return NULL;
}

kv_view qt_kv_view(const struct qtool_kv_cache *c)
{
    kv_view v = {};
    v.k = (unsigned char *)c->k;
    v.v = (unsigned char *)c->v;
    v.param = (__half2 *)c->v_param;
    v.k_scale = c->format == QTOOL_KV_INT4 ? c->k_scale : NULL;
    v.k_zero = c->k_zero;
    v.table = c->table;
    v.table_pitch = (int)c->table_pitch;
    v.heads = (int)c->heads;
    v.page_tokens = (int)c->page_tokens;
    for (v.page_shift = 0; v.page_tokens >> v.page_shift > 1;)
        v.page_shift++;
    return v;
}
