/* Random mix24 matrices, see mix24_matrix.h. */
#include "tests/gpu/mix24_matrix.h"
#include "base/base.h"
#include "tests/gpu/reference.h"
#include "tests/unit/mix24_bits.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TWO_BYTES = 624, FOUR_BYTES = 1168, COLS = 128, GROUPS = 8 };

struct builder {
    const struct mix24_recipe *r;
    uint64_t *seed;
    size_t units, fours, strips, strip_bytes, groups;
    uint8_t *stream;
    uint16_t *perm;
    bool *unit_four;
    size_t *unit_at;
    float *decoded;
    uint8_t *outlier; /* [n][units * COLS]: 1 for an outlier */
};

static uint32_t next(struct builder *b)
{
    return gpu_hash((*b->seed)++);
}

static double uniform(struct builder *b)
{
    return next(b) * 0x1p-32;
}

static void *zeroed(size_t count, size_t size)
{
    void *p = calloc(count ? count : 1, size);
    if (!p)
        abort();
    return p;
}

/* ---- order of groups ------------------------------------------------------------------------ */

static void lay_out(struct builder *b)
{
    const struct mix24_recipe *r = b->r;
    b->groups = (r->k + 15) / 16;
    size_t g4 = (size_t)(r->fours * (double)b->groups + 0.5), g2 = b->groups - g4;
    b->fours = (g4 + GROUPS - 1) / GROUPS;
    b->units = b->fours + (g2 + GROUPS - 1) / GROUPS;
    b->strips = (r->n + 15) / 16;
    b->perm = zeroed(b->units * GROUPS, 2);
    b->unit_four = zeroed(b->units, sizeof(bool));
    b->unit_at = zeroed(b->units + 1, sizeof(size_t));
    uint16_t *order = zeroed(b->groups, 2);
    for (size_t i = 0; i < b->groups; i++)
        order[i] = (uint16_t)i;
    for (size_t i = b->groups; r->shuffled && i > 1; i--) {
        size_t j = next(b) % i;
        uint16_t t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
    size_t two = 0, four = g2;
    for (size_t u = 0; u < b->units; u++) {
        b->unit_four[u] = (u + 1) * b->fours / b->units > u * b->fours / b->units;
        b->unit_at[u + 1] = b->unit_at[u] + (b->unit_four[u] ? FOUR_BYTES : TWO_BYTES);
        for (size_t g = 0; g < GROUPS; g++) {
            size_t *from = b->unit_four[u] ? &four : &two;
            size_t end = b->unit_four[u] ? b->groups : g2;
            b->perm[u * GROUPS + g] = *from < end ? order[(*from)++] : 0xffff;
        }
    }
    b->strip_bytes = b->unit_at[b->units];
    free(order);
}

/* ---- weights -------------------------------------------------------------------------------- */

static float weight_of(unsigned c, unsigned z, double sigma)
{
    float zero = qt_f16_to_f32(qt_f32_to_f16((float)(z * sigma * 0x1p-22)));
    return qt_f16_to_f32(qt_f32_to_f16((float)(c * sigma * 0x1p-22 - zero)));
}

/* Writes a random group of 16 channels in the 16 rows of a strip. */
static void put_group(struct builder *b, size_t strip, size_t u, unsigned g)
{
    const struct mix24_recipe *r = b->r;
    const bool four = b->unit_four[u];
    uint8_t *record = b->stream + strip * b->strip_bytes + b->unit_at[u];
    unsigned blk = g / 4, t = g % 4, source = b->perm[u * GROUPS + g], z2 = next(b) % 16;
    unsigned exponent = r->wide ? 5 + next(b) % 21 : 20 + next(b) % 6;
    unsigned mantissa = four ? next(b) % 2 * 4 : next(b) % 8;
    uint16_t s2 = (uint16_t)(exponent << 10 | mantissa << 7);
    if (source == 0xffff)
        return;
    mix24_put_u(record, four, blk, t, (unsigned)s2 | z2);
    for (unsigned row = 0; row < 16; row++) {
        size_t n = strip * 16 + row;
        unsigned q = next(b) % 16, z = next(b) % (four ? 16 : 4);
        q = q + z2 == 0 ? 1 : q;
        double sigma = (double)(q + z2) * (double)qt_f16_to_f32(s2);
        mix24_put_params(record, four, blk, t, row, q, z);
        for (unsigned j = 0; j < 16; j++) {
            size_t k = (size_t)source * 16 + j;
            bool out = n < r->n && b->outlier[n * b->units * COLS + u * COLS + g * 16 + j];
            unsigned c = n >= r->n || k >= r->k || out ? z : next(b) % (four ? 16 : 4);
            mix24_put_code(record, four, blk, t, row, j, c);
            if (n < r->n && k < r->k && !out)
                b->decoded[n * r->k + k] = ldexpf(weight_of(c, z, sigma), r->scale_exp2);
        }
    }
}

/* ---- outliers ------------------------------------------------------------------------------- */

/* Marks random outliers, before codes are made. Returns their number. */
static size_t choose_outliers(struct builder *b)
{
    const struct mix24_recipe *r = b->r;
    size_t count = 0, cols = b->units * COLS;
    b->outlier = zeroed(r->n * cols, 1);
    for (size_t n = 0; n < r->n; n++) {
        double share = r->skewed ? (n % 37 == 5 ? 0.5 : n % 3 ? 0 : r->outliers) : r->outliers;
        for (size_t c = 0; c < cols && share > 0; c++) {
            unsigned source = b->perm[c / 16];
            if (b->unit_four[c / COLS] || source * 16 + c % 16 >= r->k)
                continue;
            b->outlier[n * cols + c] = uniform(b) < share;
            count += b->outlier[n * cols + c];
        }
    }
    return count;
}

static void *upload(const void *data, size_t bytes)
{
    void *d = gpu_alloc((bytes + 15) / 16 * 16);
    CHECK(cudaMemset(d, 0xff, (bytes + 15) / 16 * 16)); /* padding may have any value */
    CHECK(cudaMemcpy(d, data, bytes, cudaMemcpyHostToDevice));
    return d;
}

static void put_outliers(struct builder *b, struct qtool_matmul_mix24 *out, size_t count)
{
    const struct mix24_recipe *r = b->r;
    size_t cols = b->units * COLS, panels = (cols + 65535) / 65536, e = 0;
    uint32_t *ptr = zeroed(panels * (r->n + 1), 4);
    uint16_t *col = zeroed(count, 2), *val = zeroed(count, 2);
    for (size_t p = 0; p < panels; p++) {
        for (size_t n = 0; n < r->n; n++) {
            ptr[p * (r->n + 1) + n] = (uint32_t)e;
            for (size_t c = p * 65536; c < cols && c < (p + 1) * 65536; c++) {
                if (!b->outlier[n * cols + c])
                    continue;
                float v = (float)(uniform(b) - 0.5) * 0.3f;
                size_t k = (size_t)b->perm[c / 16] * 16 + c % 16;
                col[e] = (uint16_t)c;
                val[e] = qt_f32_to_f16(v);
                b->decoded[n * r->k + k] = ldexpf(qt_f16_to_f32(val[e]), r->scale_exp2);
                e++;
            }
        }
        ptr[p * (r->n + 1) + r->n] = (uint32_t)e;
    }
    out->csr_ptr = upload(ptr, panels * (r->n + 1) * 4);
    out->csr_col = upload(col, count * 2);
    out->csr_val = upload(val, count * 2);
    free(ptr);
    free(col);
    free(val);
}

/* ---- matrices ------------------------------------------------------------------------------- */

void mix24_matrix_new(struct mix24_matrix *m, const struct mix24_recipe *r, uint64_t *seed)
{
    struct builder b = {.r = r, .seed = seed};
    memset(m, 0, sizeof *m);
    lay_out(&b);
    m->outliers = choose_outliers(&b);
    b.stream = zeroed(b.strips, b.strip_bytes);
    m->decoded = b.decoded = zeroed(r->n * r->k, sizeof(float));
    for (size_t s = 0; s < b.strips; s++)
        for (size_t u = 0; u < b.units; u++)
            for (unsigned g = 0; g < GROUPS; g++)
                put_group(&b, s, u, g);
    struct qtool_matmul_weight *w = &m->weight;
    w->kind = QTOOL_MATMUL_MIX24;
    w->n = r->n;
    w->k = r->k;
    w->scale_exp2 = r->scale_exp2;
    w->mix24.twos = b.units - b.fours;
    w->mix24.fours = b.fours;
    w->mix24.stream = upload(b.stream, b.strips * b.strip_bytes);
    w->mix24.perm = upload(b.perm, b.units * GROUPS * 2);
    w->mix24.outliers = m->outliers;
    if (r->outliers > 0)
        put_outliers(&b, &w->mix24, m->outliers);
    m->device_decoded = upload(m->decoded, r->n * r->k * 4);
    free(b.stream);
    free(b.perm);
    free(b.unit_four);
    free(b.unit_at);
    free(b.outlier);
}

void mix24_matrix_free(struct mix24_matrix *m)
{
    const struct qtool_matmul_mix24 *w = &m->weight.mix24;
    const void *all[] = {w->stream, w->perm, w->csr_ptr, w->csr_col, w->csr_val, m->device_decoded};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        CHECK(cudaFree((void *)(uintptr_t)all[i]));
    free(m->decoded);
}
