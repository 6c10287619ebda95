#include "base/num.h"
#include "base/mem.h"
#include "base/par.h"

#include <stdatomic.h>

static const struct {
    const char *name;
    unsigned char bits;
} dtypes[QT_DTYPE_COUNT] = {
    [QT_BOOL] = {"BOOL", 8},
    [QT_F4] = {"F4", 4},
    [QT_F6_E2M3] = {"F6_E2M3", 6},
    [QT_F6_E3M2] = {"F6_E3M2", 6},
    [QT_U8] = {"U8", 8},
    [QT_I8] = {"I8", 8},
    [QT_F8_E5M2] = {"F8_E5M2", 8},
    [QT_F8_E4M3] = {"F8_E4M3", 8},
    [QT_F8_E8M0] = {"F8_E8M0", 8},
    [QT_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", 8},
    [QT_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", 8},
    [QT_I16] = {"I16", 16},
    [QT_U16] = {"U16", 16},
    [QT_F16] = {"F16", 16},
    [QT_BF16] = {"BF16", 16},
    [QT_I32] = {"I32", 32},
    [QT_U32] = {"U32", 32},
    [QT_F32] = {"F32", 32},
    [QT_C64] = {"C64", 64},
    [QT_F64] = {"F64", 64},
    [QT_I64] = {"I64", 64},
    [QT_U64] = {"U64", 64},
};

const char *qt_dtype_name(enum qt_dtype t)
{
    return (unsigned)t < QT_DTYPE_COUNT ? dtypes[t].name : "?";
}

bool qt_dtype_parse(enum qt_dtype *out, const char *name)
{
    for (unsigned i = 0; i < QT_DTYPE_COUNT; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *out = (enum qt_dtype)i;
            return true;
        }
    return false;
}

unsigned qt_dtype_bits(enum qt_dtype t)
{
    return (unsigned)t < QT_DTYPE_COUNT ? dtypes[t].bits : 0;
}

bool qt_dtype_is_weight(enum qt_dtype t)
{
    return t == QT_F16 || t == QT_BF16 || t == QT_F32 || t == QT_F64;
}

static void f16_to_f32(float *restrict dst, const uint16_t *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = qt_f16_to_f32(src[i]);
}

static void bf16_to_f32(float *restrict dst, const uint16_t *restrict src, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = qt_bf16_to_f32(src[i]);
}

/* Copies through an aligned buffer, as checkpoint data may start at any byte offset. */
static void to_f32(float *dst, const void *src, enum qt_dtype t, size_t n)
{
    enum { CHUNK = 512 };
    union {
        uint16_t half[CHUNK];
        double number[CHUNK];
    } buf;
    const unsigned char *bytes = src;
    size_t size = qt_dtype_bits(t) / 8;
    if (t == QT_F32) {
        memcpy(dst, src, n * sizeof *dst);
        return;
    }
    for (size_t i = 0; i < n; i += CHUNK) {
        size_t m = n - i < CHUNK ? n - i : CHUNK;
        memcpy(&buf, bytes + i * size, m * size);
        if (t == QT_F16)
            f16_to_f32(dst + i, buf.half, m);
        else if (t == QT_BF16)
            bf16_to_f32(dst + i, buf.half, m);
        else
            for (size_t j = 0; j < m; j++)
                dst[i + j] = (float)buf.number[j];
    }
}

enum { PIECE = 1 << 18 }; /* elements per parallel item */

struct convert {
    float *dst;
    const unsigned char *src;
    enum qt_dtype t;
    size_t n;
};

static void convert_piece(void *ctx, size_t item)
{
    const struct convert *c = ctx;
    const size_t at = item * PIECE;
    to_f32(c->dst + at, c->src + at * (qt_dtype_bits(c->t) / 8), c->t,
           qt_min_size(PIECE, c->n - at));
}

void qt_to_f32(float *dst, const void *src, enum qt_dtype t, size_t n)
{
    if (n <= PIECE)
        to_f32(dst, src, t, n);
    else
        qt_parallel_for(qt_ceil_div(n, PIECE), convert_piece, &(struct convert){dst, src, t, n});
}

uint16_t qt_f32_to_f16(float f)
{
    uint32_t u = qt_f32_bits(f), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
    if (mag > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (mag >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (mag < 0x38800000) { /* below 2^-14: let the FP32 adder round at 2^-24 */
        float r = qt_bits_f32(mag) + 0.5f;
        return (uint16_t)(sign | (qt_f32_bits(r) - 0x3f000000));
    }
    mag += 0xfff + (mag >> 13 & 1); /* half an ulp, ties to even */
    return (uint16_t)(sign | ((mag - 0x38000000) >> 13));
}

uint16_t qt_f32_to_bf16(float f)
{
    uint32_t u = qt_f32_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static size_t find_nonfinite(const float *x, size_t n)
{
    enum { CHUNK = 256 };
    for (size_t i = 0; i < n; i += CHUNK) {
        size_t m = n - i < CHUNK ? n - i : CHUNK;
        unsigned bad = 0;
        for (size_t j = 0; j < m; j++) /* branch-free for vectorization */
            bad |= (qt_f32_bits(x[i + j]) & 0x7f800000u) == 0x7f800000u;
        for (size_t j = 0; bad && j < m; j++)
            if (!isfinite(x[i + j]))
                return i + j;
    }
    return n;
}

struct search {
    const float *x;
    size_t n;
    _Atomic size_t first; /* lowest index found so far, or n */
};

static void search_piece(void *ctx, size_t item)
{
    struct search *s = ctx;
    const size_t at = item * PIECE, n = qt_min_size(PIECE, s->n - at);
    const size_t found = find_nonfinite(s->x + at, n);
    size_t first = s->first;
    while (found < n && at + found < first &&
           !atomic_compare_exchange_weak(&s->first, &first, at + found))
        ;
}

size_t qt_find_nonfinite(const float *x, size_t n)
{
    struct search s = {x, n, n};
    if (n <= PIECE)
        return find_nonfinite(x, n);
    qt_parallel_for(qt_ceil_div(n, PIECE), search_piece, &s);
    return s.first;
}

/* ---- values of any dtype that are not finite ------------------------------------------------ */

/* An element is not finite if its bits under the mask equal `bits`. mask = 0: all are finite. */
struct nonfinite {
    unsigned size; /* bytes of an element */
    uint64_t mask, bits;
};

static struct nonfinite nonfinite_bits(enum qt_dtype t)
{
    static const struct nonfinite all[QT_DTYPE_COUNT] = {
        [QT_F16] = {2, 0x7c00, 0x7c00},
        [QT_BF16] = {2, 0x7f80, 0x7f80},
        [QT_F32] = {4, 0x7f800000, 0x7f800000},
        [QT_C64] = {4, 0x7f800000, 0x7f800000},
        [QT_F64] = {8, 0x7ff0000000000000, 0x7ff0000000000000},
        [QT_F8_E5M2] = {1, 0x7c, 0x7c},
        [QT_F8_E4M3] = {1, 0x7f, 0x7f},
        [QT_F8_E8M0] = {1, 0xff, 0xff},
        [QT_F8_E4M3FNUZ] = {1, 0xff, 0x80},
        [QT_F8_E5M2FNUZ] = {1, 0xff, 0x80},
    };
    return (unsigned)t < QT_DTYPE_COUNT ? all[t] : (struct nonfinite){0};
}

/* Loads may be unaligned, so elements are copied; compilers vectorize this. */
#define COUNT_ELEMENTS(type)                                                                       \
    for (size_t i = 0; i < n; i++) {                                                               \
        type v;                                                                                    \
        memcpy(&v, src + i * sizeof v, sizeof v);                                                  \
        count += (v & (type)f.mask) == (type)f.bits;                                               \
    }

static size_t count_nonfinite(const unsigned char *src, struct nonfinite f, size_t n)
{
    size_t count = 0;
    switch (f.size) {
    case 1:
        COUNT_ELEMENTS(uint8_t)
        break;
    case 2:
        COUNT_ELEMENTS(uint16_t)
        break;
    case 4:
        COUNT_ELEMENTS(uint32_t)
        break;
    case 8:
        COUNT_ELEMENTS(uint64_t)
        break;
    }
    return count;
}

struct count {
    const unsigned char *src;
    struct nonfinite f;
    size_t n;
    _Atomic size_t sum;
};

static void count_piece(void *ctx, size_t item)
{
    struct count *c = ctx;
    const size_t at = item * PIECE, n = qt_min_size(PIECE, c->n - at);
    const size_t found = count_nonfinite(c->src + at * c->f.size, c->f, n);
    if (found)
        c->sum += found;
}

size_t qt_count_nonfinite(const void *src, enum qt_dtype t, size_t n)
{
    struct count c = {.src = src, .f = nonfinite_bits(t), .n = t == QT_C64 ? 2 * n : n};
    if (c.f.mask == 0)
        return 0;
    if (c.n <= PIECE)
        return count_nonfinite(src, c.f, c.n);
    qt_parallel_for(qt_ceil_div(c.n, PIECE), count_piece, &c);
    return c.sum;
}
