/* The mix24 tile kernel's plan: estimated times, arguments, launch. */
#include "kernels/cuda/common/prepare.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/mix24/tile.h"

#include <math.h>

enum {
    MAX_TOKENS = 1 << 19
}; /* limited by the grid of the gather kernel: a warp per 8 tokens and unit */

/* Returns the shared memory for outliers: buffers for columns of X, or patch values per warp. */
static int outlier_bytes(const struct qt_tile_kind *k)
{
    return qt_mix24_tile_sums(k->tokens) ? 4 * OUTLIER_DEPTH * outlier_buffer_bytes(QT_MIX24_TILE_T)
                                         : 4 * k->warpgroups * PATCH_STEP_BYTES *
                                               qt_mix24_tile_steps(k->warpgroups, k->tokens);
}

/* Time for outlier sums in shared tiles: a constant, and the time for 64 columns, 64 rows and a
 * token if all weights were outliers. With 0.2 % outliers, 4096 x 14336, 64 tokens, takes 44.0 us
 * in shared tiles of 128 x 64 and 30.6 us in clusters of 2 with tiles of 128 x 32. */
static const double sums_start_us = 2, sums_us = .085 / 64 / .002;
/* Time for outliers in all tiles: the transpose of X, also per token; lists. */
static const double columns_us = 1.5, token_us = .01, lists_us = 2;
/* Extra time of Stream-K with lists: 6144 x 4096, 128 tokens, takes 20.4 us in shared tiles of 128
 * x 128 and 19.2 us in clusters of 2. */
static const float shared_lists_us = .6f;
/* Bytes per microsecond of the gather kernel, read and written. */
static const double gather_rate = 3.5e6;

static double outlier_share(const struct qtool_matmul_weight *w)
{
    return (double)w->mix24.outliers / ((double)qt_mix24_csr_rows(w) * (double)w->k);
}

/* True if the kernel for tiles of `tokens` tokens adds outliers from columns of X. */
static bool adds_outliers(const struct qtool_matmul_weight *w, int tokens)
{
    return w->mix24.csr_ptr && qt_mix24_tile_sums(tokens);
}

/* Returns the bytes of an outlier list, or 0 if the kernel for tiles of `tokens` tokens uses none.
 */
static int list_bytes(const struct qtool_matmul_weight *w, int tokens)
{
    return w->mix24.csr_ptr && !qt_mix24_tile_sums(tokens) ? PATCH_LIST_BYTES : 0;
}

/* Returns qt_tile_kind.whole_factor. With outliers it was fitted together with the times of the
 * table and those above. With 256 tokens, thread blocks that share tiles read X, lists and records
 * from different places (5120 x 27648: 141 us; in tiles of 192 x 128 125 us). Without outliers and
 * with 96 or more tokens, shared tiles of 4096 columns of k take longer than the model (6144 x
 * 4096, 160 tokens: 23.4 us, clusters of 2 21.5). This is applied to one or two token tiles only;
 * with more, tiles of 128 and 192 tokens would be chosen too often (8192 x 8192, 1024 tokens: 128 x
 * 256 1.00 times cuBLAS, 128 x 128 0.91; 4096 tokens: dequantized 0.94, 128 x 192 0.89). */
static float whole_factor(const struct qtool_matmul_weight *w, int tokens, size_t m)
{
    if (w->mix24.csr_ptr)
        return tokens == 256 ? .84f : tokens == 64 ? QT_WHOLE_FACTOR_WIDE : QT_WHOLE_FACTOR;
    return tokens == 256 || (tokens > 64 && qt_tile_short(tokens, m)) ? QT_WHOLE_FACTOR_WIDE
                                                                      : QT_WHOLE_FACTOR;
}

static struct qt_tile_matrix matrix_of(const struct qtool_matmul_weight *w, size_t m)
{
#define KIND(warpgroups, tokens, us, outlier_us)                                                   \
    {warpgroups, tokens, 2, NULL, w->mix24.csr_ptr ? outlier_us : us, whole_factor(w, tokens, m)},
    const struct qt_tile_kind kinds[] = {QT_MIX24_TILE_TABLE(KIND)};
    struct qt_tile_matrix t = {};
    t.strips = qt_mix24_strips(w);
    t.blocks = 2 * qt_mix24_units(w);
    t.count = QT_MIX24_TILE_KINDS;
    for (int i = 0; i < t.count; i++) {
        struct qt_tile_kind k = kinds[i];
        k.kernel = qt_mix24_tile_instance(i);
        k.head_bytes = w->mix24.csr_ptr ? outlier_bytes(&k) : 0;
        k.weight_bytes =
            4 * k.warpgroups * (mix24_unit_bytes(w->mix24.fours > 0) + list_bytes(w, k.tokens));
        k.before_us = (float)(4 * 64.0 * t.blocks * (double)m / gather_rate);
        if (adds_outliers(w, k.tokens)) {
            k.before_us += (float)(columns_us + token_us * (double)m);
            k.serial_us = (float)(sums_start_us +
                                  sums_us * outlier_share(w) * k.warpgroups * k.tokens * t.blocks);
        }
        if (list_bytes(w, k.tokens)) {
            k.before_us += (float)lists_us;
            k.shared_us = shared_lists_us;
        }
        t.kinds[i] = k;
    }
    return t;
}

/* Offsets in the workspace: X in packed order, its transpose, outlier lists, partial sums of
 * outliers, prepared X. */
struct workspace {
    size_t rows, columns, lists, sums, prepared, bytes;
};

/* Returns the tokens of a column of the transposed X. */
static size_t column_pitch(const struct qtool_matmul_plan *p)
{
    return round_up(p->m, QT_MIX24_TILE_T);
}

static struct workspace workspace_for(const struct qtool_matmul_plan *p,
                                      const struct qtool_matmul_weight *w,
                                      const struct qt_tile_matrix *t)
{
    struct workspace at;
    const struct qt_tile_kind *k = qt_tile_kind_of(p, t);
    const size_t units = (size_t)qt_mix24_units(w), cols = units * QT_MIX24_UNIT_COLS;
    const size_t tile = (size_t)(k->warpgroups * 64 * k->tokens);
    const bool sums = adds_outliers(w, k->tokens);
    at.rows = round_up(qt_tile_workspace(p, t), 256);
    at.columns = round_up(at.rows + p->m * cols * 2, 256);
    at.lists = at.columns + (sums ? column_pitch(p) * cols * 2 : 0);
    at.sums = at.lists + (size_t)t->strips * units * (size_t)list_bytes(w, k->tokens);
    at.prepared = at.sums + (sums ? (size_t)qt_state(p)->grid_x * 2 * tile * 4 : 0);
    at.bytes = at.prepared + qt_prepare_bytes(p);
    return at;
}

/* Encodes the tensor map of the lists, in boxes of one unit of box_strips strips. */
static bool list_map(const struct qtool_matmul_plan *p, CUtensorMap *map, const void *lists,
                     int strips, int units, int box_strips)
{
    const size_t pitch = (size_t)units * PATCH_LIST_BYTES;
    const struct qt_tensor t = {
        lists, 2, {pitch / 8, (size_t)strips}, {pitch}, {PATCH_LIST_BYTES / 8, box_strips}, false};
    return qt_tensor_map(p, map, &t);
}

bool qt_mix24_tile_choose(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                          double *us)
{
    const struct qt_tile_matrix t = matrix_of(w, p->m);
    return p->m <= MAX_TOKENS && qt_tile_choose_kind(p, &t, us);
}

int qt_mix24_tile_check(struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w)
{
    const struct qt_tile_matrix t = matrix_of(w, p->m);
    if (p->m > MAX_TOKENS)
        return qt_refuse(p, QTOOL_UNSUPPORTED, "the tile kernel takes at most 2^19 tokens");
    int rc = qt_tile_check_config(p, &t);
    if (rc == QTOOL_OK)
        p->workspace_bytes = workspace_for(p, w, &t).bytes;
    return rc;
}

int qt_mix24_tile_run(const struct qtool_matmul_plan *p, const struct qtool_matmul_weight *w,
                      void *y, const void *x, void *workspace, void *stream)
{
    struct qt_mix24_tile_args a = {};
    const struct qt_tile_matrix t = matrix_of(w, p->m);
    const struct qt_tile_kind *k = qt_tile_kind_of(p, &t);
    if (!k || workspace_for(p, w, &t).bytes > p->workspace_bytes)
        return QTOOL_UNSUPPORTED;
    const struct workspace at = workspace_for(p, w, &t);
    char *space = (char *)workspace;
    if (!qt_tile_fill(&a, p, &t, y, workspace))
        return QTOOL_UNSUPPORTED;
    a.units = qt_mix24_units(w);
    a.fours = (int)w->mix24.fours;
    a.factor = ldexpf(1, w->scale_exp2);
    a.dependent = true;
    const bool sums = qt_mix24_tile_sums(k->tokens);
    a.outliers = qt_mix24_outliers_of(w);
    a.outlier_sums = (float *)(space + at.sums);
    a.list_bytes = list_bytes(w, k->tokens);
    const struct qt_mix24_gathered to = {space + at.rows,
                                         adds_outliers(w, k->tokens) ? space + at.columns : NULL,
                                         column_pitch(p),
                                         true,
                                         a.list_bytes ? (uint32_t *)(space + at.lists) : NULL,
                                         space + at.prepared};
    a.outliers.columns = (const __half *)to.columns;
    a.outliers.column_pitch = to.column_pitch;
    if (!qt_tile_x_maps(&a, p, k, to.rows, (size_t)t.blocks) ||
        !qt_mix24_record_maps(p, a.records, w, 4 * k->warpgroups) ||
        (to.lists && !list_map(p, &a.lists, to.lists, t.strips, a.units, 4 * k->warpgroups)))
        return QTOOL_UNSUPPORTED;
    int rc = qt_mix24_gather(p, w, &to, x, &a.token_factor, stream);
    if (rc != QTOOL_OK)
        return rc;
    return qt_launch_clusters(p, &a, (k->warpgroups + (sums ? 2 : 1)) * 128, 1 << a.split_log2,
                              true, stream);
}
