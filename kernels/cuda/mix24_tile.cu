/* Host side of the mix24 tile kernel: what a plan needs to know, launches. */
#include "kernels/cuda/mix24_decode.cuh"
#include "kernels/cuda/mix24_tile.h"

#include <math.h>

enum { MAX_TOKENS = 1 << 17 }; /* outliers count columns of X in 32 bits */

static struct qt_tile_matrix matrix_of(const struct qt_matmul_weight *w)
{
#define KIND(warpgroups, tokens, us) {warpgroups, tokens, 2, NULL, us, 0, 0},
    static const struct qt_tile_kind kinds[] = {QT_MIX24_TILE_TABLE(KIND)};
    struct qt_tile_matrix t = {};
    t.strips = qt_mix24_strips(w);
    t.blocks = 2 * qt_mix24_units(w);
    t.count = QT_MIX24_TILE_KINDS;
    for (int i = 0; i < t.count; i++) {
        t.kinds[i] = kinds[i];
        t.kinds[i].kernel = qt_mix24_tile_instance(i);
        t.kinds[i].weight_bytes = 4 * kinds[i].warpgroups * mix24_unit_bytes(w->mix24.fours > 0);
    }
    return t;
}

/* Offsets in the workspace: X as qt_mix24_gather leaves it, sums of outliers, X as qt_prepare_run
 * does. */
struct workspace {
    size_t rows, columns, sums, prepared, bytes;
};

static struct workspace workspace_for(const struct qt_matmul_plan *p,
                                      const struct qt_matmul_weight *w,
                                      const struct qt_tile_matrix *t)
{
    struct workspace at;
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    const size_t cols = (size_t)qt_mix24_units(w) * QT_MIX24_UNIT_COLS;
    const size_t sums = (size_t)p->grid_x * 2 * (size_t)(k->warpgroups * 64 * k->tokens) * 4;
    const bool outliers = w->mix24.csr_ptr != NULL;
    at.rows = round_up(qt_tile_workspace(p, t), 256);
    at.columns = round_up(at.rows + p->m * cols * 2, 256);
    at.sums = at.columns + (outliers ? round_up(p->m, QT_MIX24_TILE_CHUNK) * (cols + 1) * 2 : 0);
    at.prepared = at.sums + (outliers ? sums : 0);
    at.bytes = at.prepared + qt_prepare_bytes(p);
    return at;
}

bool qt_mix24_tile_choose(struct qt_matmul_plan *p, const struct qt_matmul_weight *w, double *us)
{
    const struct qt_tile_matrix t = matrix_of(w);
    return p->m <= MAX_TOKENS && qt_tile_choose_kind(p, &t, us);
}

int qt_mix24_tile_check(struct qt_matmul_plan *p, const struct qt_matmul_weight *w)
{
    const struct qt_tile_matrix t = matrix_of(w);
    if (p->m > MAX_TOKENS)
        return qt_refuse(p, QT_MATMUL_UNSUPPORTED, "too many tokens");
    int rc = qt_tile_check_config(p, &t);
    if (rc == QT_MATMUL_OK)
        p->workspace_bytes = workspace_for(p, w, &t).bytes;
    return rc;
}

int qt_mix24_tile_run(const struct qt_matmul_plan *p, const struct qt_matmul_weight *w, void *y,
                      const void *x, void *workspace, void *stream)
{
    struct qt_mix24_tile_args a = {};
    const struct qt_tile_matrix t = matrix_of(w);
    const struct qt_tile_kind *k = qt_tile_kind_of(p, &t);
    if (!p->kernel || w->n != p->n || w->k != p->k || !workspace || !k ||
        workspace_for(p, w, &t).bytes > p->workspace_bytes)
        return QT_MATMUL_UNSUPPORTED;
    const struct workspace at = workspace_for(p, w, &t);
    const bool prepared = p->options.dtype == QT_MATMUL_BF16;
    char *space = (char *)workspace;
    size_t pitch = p->k;
    qt_tile_fill(&a, p, &t, y, workspace);
    a.units = qt_mix24_units(w);
    a.fours = (int)w->mix24.fours;
    a.factor = ldexpf(1, w->scale_exp2);
    a.dependent = true;
    a.outliers = qt_mix24_outliers_of(w);
    a.outliers.warps = QT_MIX24_TILE_OUTLIER_WARPS;
    a.outlier_sums = (float *)(space + at.sums);
    const struct qt_mix24_gathered to = {space + at.rows,
                                         a.outliers.ptr ? space + at.columns : NULL,
                                         round_up(p->m, QT_MIX24_TILE_CHUNK), true};
    a.outliers.columns = (const __half *)to.columns;
    a.outliers.column_pitch = to.column_pitch;
    a.outliers.zeros = a.units * QT_MIX24_UNIT_COLS;
    if (!qt_x_map(p, &a.x, to.rows, (size_t)t.blocks, k->tokens, k->blocks) ||
        !qt_mix24_record_maps(p, a.records, w, 4 * k->warpgroups))
        return QT_MATMUL_UNSUPPORTED;
    if (prepared) {
        int rc = qt_prepare_run(p, &x, &a.token_factor, space + at.prepared, stream);
        if (rc != QT_MATMUL_OK)
            return rc;
        pitch = round_up(p->k, QT_BLOCK_COLS);
    }
    int rc = qt_mix24_gather(p, w, &to, x, pitch, prepared || p->options.dependent_launch, stream);
    if (rc != QT_MATMUL_OK)
        return rc;
    return qt_launch_clusters(p, &a, (k->warpgroups + QT_MIX24_TILE_OTHERS) * 128, 1 + a.pairs,
                              true, stream);
}
