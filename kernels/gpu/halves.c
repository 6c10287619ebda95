/* Factors of products in FP16, and largest magnitudes that are known already (product.h). */
#include "kernels/gpu/product.h"

/* In front of the values, with their alignment, is the largest magnitude of the factor. */
enum { VALUES = 256 };

void *gpu_half_values(const struct gpu_half *h)
{
    return (char *)h->z.p + VALUES;
}

uint32_t *gpu_half_largest(const struct gpu_half *h)
{
    return h->z.p;
}

/* ---- what is forgotten ---------------------------------------------------------------------- */

static bool overlap(const void *a, size_t bytes_a, const void *b, size_t bytes_b)
{
    return (uintptr_t)a < (uintptr_t)b + bytes_b && (uintptr_t)b < (uintptr_t)a + bytes_a;
}

static size_t extent(const struct gpu_half *h)
{
    return ((size_t)(h->rows - 1) * (size_t)h->ld + (size_t)h->k) * sizeof *h->x;
}

void gpu_products_forget(struct gpu_products *g)
{
    for (size_t i = 0; i < GPU_HALVES; i++)
        g->halves[i].x = NULL;
    for (size_t i = 0; i < GPU_LARGEST; i++)
        g->largest[i].x = NULL;
}

void gpu_products_changed(struct gpu_products *g, const void *p, size_t bytes)
{
    for (size_t i = 0; i < GPU_HALVES; i++)
        if (g->halves[i].x && overlap(g->halves[i].x, extent(&g->halves[i]), p, bytes))
            g->halves[i].x = NULL;
    for (size_t i = 0; i < GPU_LARGEST; i++)
        if (g->largest[i].x &&
            overlap(g->largest[i].x, g->largest[i].count * sizeof *g->largest[i].x, p, bytes))
            g->largest[i].x = NULL;
}

void gpu_products_release(struct gpu_products *g)
{
    while (g->kept_count > 0) {
        struct gpu_half *h = &g->kept[--g->kept_count];
        g->gpu->free(g->gpu, h->z.p);
        *h = (struct gpu_half){0};
    }
    g->kept_full = false;
}

/* ---- largest magnitudes --------------------------------------------------------------------- */

int gpu_largest_new(uint32_t **out, struct gpu_products *g, const float *x, size_t count,
                    struct qt_err *err)
{
    const size_t i = g->next_largest++ % GPU_LARGEST;
    int rc;
    *out = NULL;
    g->largest[i].x = NULL;
    QT_TRY(gpu_scratch_need(&g->known, g->gpu, GPU_LARGEST, sizeof **out, err));
    *out = (uint32_t *)g->known.p + i;
    QT_TRY(g->gpu->fill(g->gpu, *out, 0, sizeof **out, err));
    g->largest[i].x = x;
    g->largest[i].count = count;
done:
    return rc;
}

/* Finds the largest magnitude of x, which may be known. */
static int find_largest(struct gpu_products *g, const struct gpu_half *h, const float *x, int rows,
                        int k, int ld, struct qt_err *err)
{
    const size_t count = (size_t)rows * (size_t)k;
    for (size_t i = 0; i < GPU_LARGEST && k == ld; i++)
        if (g->largest[i].x == x && g->largest[i].count == count)
            return g->gpu->copy(g->gpu, gpu_half_largest(h), (uint32_t *)g->known.p + i,
                                sizeof(uint32_t), err);
    int rc = g->gpu->fill(g->gpu, gpu_half_largest(h), 0, sizeof(uint32_t), err);
    return rc < 0 ? rc
                  : gpu_check_launch(gpu_math_largest(gpu_half_largest(h), x, (size_t)rows,
                                                      (size_t)k, (size_t)ld, gpu_stream_of(g->gpu)),
                                     "FP16 factors", err);
}

/* ---- factors -------------------------------------------------------------------------------- */

static bool is_factor(const struct gpu_half *h, const float *x, int rows, int k, int ld)
{
    return h->x == x && h->rows == rows && h->k == k && h->ld == ld;
}

/* The place for a factor that stays, or NULL. It may take an eighth of the free memory: those who
 * follow need some, too. */
static struct gpu_half *place_to_keep(struct gpu_products *g, size_t bytes)
{
    if (g->kept_count == GPU_KEPT || g->kept_full)
        return NULL;
    g->kept_full = g->gpu->room(g->gpu) / 8 < bytes;
    return g->kept_full ? NULL : &g->kept[g->kept_count];
}

int gpu_half_of(struct gpu_half **out, struct gpu_products *g, const float *x, int rows, int k,
                int ld, bool keep, struct qt_err *err)
{
    const size_t values = (size_t)rows * (size_t)k;
    struct gpu_half *h = g->halves;
    int rc;
    for (size_t i = 0; i < g->kept_count; i++)
        if (is_factor(*out = &g->kept[i], x, rows, k, ld))
            return QT_OK;
    for (size_t i = 0; i < GPU_HALVES; i++) {
        if (is_factor(*out = &g->halves[i], x, rows, k, ld)) {
            (*out)->used = ++g->uses;
            return QT_OK;
        }
        h = (*out)->used < h->used ? *out : h;
    }
    struct gpu_half *kept = keep ? place_to_keep(g, values * sizeof(uint16_t)) : NULL;
    *out = h = kept ? kept : h;
    h->x = NULL;
    QT_TRY(gpu_scratch_need(&h->z, g->gpu, VALUES + values * sizeof(uint16_t), 1, err));
    QT_TRY(find_largest(g, h, x, rows, k, ld, err));
    QT_TRY(
        gpu_check_launch(gpu_math_to_half(gpu_half_values(h), gpu_half_largest(h), x, (size_t)rows,
                                          (size_t)k, (size_t)ld, gpu_stream_of(g->gpu)),
                         "FP16 factors", err));
    *h = (struct gpu_half){h->z, x, rows, k, ld, ++g->uses};
    g->kept_count += kept != NULL;
done:
    return rc;
}
