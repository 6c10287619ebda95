/* Host side of the mix24 tile kernel: what a plan needs to know, launches. */
#include "kernels/cuda/mix24/tile.h"

#include <math.h>

enum { MAX_TOKENS = 1 << 19 }; /* the launch before has a warp for 8 tokens and a unit */

/* Shared memory for outliers: columns of X; values of so many k-steps a warp. */
static int outlier_bytes(const struct qt_tile_kind *k)
{
    return qt_mix24_tile_sums(k->tokens) ? 4 * OUTLIER_DEPTH * outlier_buffer_bytes(QT_MIX24_TILE_T)
                                         : 4 * k->warpgroups * PATCH_STEP_BYTES *
                                               qt_mix24_tile_steps(k->warpgroups, k->tokens);
}

/* Sums of outliers in shared tiles: start, and of 64 columns, 64 rows and a token, if all weights
 * were outliers. With 0.2 %, 4096 x 14336, 64 tokens, takes 44.0 us in shared tiles of 128 x 64,
 * 30.6 in pairs of 128 x 32. */
static const double sums_start_us = 2, sums_us = .085 / 64 / .002;
/* What outliers take in any tiles: X by columns, and for each token; lists. */
static const double columns_us = 1.5, token_us = .01, lists_us = 2;
/* With lists tiles that are shared otherwise than in clusters take that much longer than the model
 * has it: 6144 x 4096, 128 tokens, 20.4 us in shared tiles of 128 x 128, 19.2 in pairs. */
static const float shared_lists_us = .6f;
/* X into packed order, read and written: bytes a microsecond. */
static const double gather_rate = 3.5e6;

static double outlier_share(const struct qtool_matmul_weight *w)
{
    return (double)w->mix24.outliers / ((double)qt_mix24_csr_rows(w) * (double)w->k);
}

/* Whether a kernel for so many tokens adds up outliers, by columns of X. */
static bool adds_outliers(const struct qtool_matmul_weight *w, int tokens)
{
    return w->mix24.csr_ptr && qt_mix24_tile_sums(tokens);
}

/* Of a strip and unit; 0: a kernel for so many tokens has none. */
static int list_bytes(const struct qtool_matmul_weight *w, int tokens)
{
    return w->mix24.csr_ptr && !qt_mix24_tile_sums(tokens) ? PATCH_LIST_BYTES : 0;
}

/* With outliers fitted with the times of the table and those above. Of 256 tokens blocks that share
 * tiles want X, lists and records each from elsewhere (5120 x 27648: 141 us; in tiles of 192 rows x
 * 128 125). Without outliers, from 96 tokens on, shared tiles of 4096 columns of k take longer than
 * the model has it (6144 x 4096, 160 tokens: 23.4 us, pairs 21.5), for one or two of them: of more,
 * 128 and 192 would be chosen too often (8192 x 8192, 1024 tokens: 128 rows x 256 1.00 times
 * cuBLAS, x 128 0.91; 4096: dequantized 0.94, x 192 0.89). */
static float whole_factor(const struct qtool_matmul_weight *w, int tokens, size_t m)
{
    if (w->mix24.csr_ptr)
        return tokens == 256 ? .84f : tokens == 64 ? QT_TILE_WHOLE_WIDE : QT_TILE_WHOLE;
    return tokens == 256 || (tokens > 64 && qt_tile_short(tokens, m)) ? QT_TILE_WHOLE_WIDE
                                                                      : QT_TILE_WHOLE;
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

/* Offsets in the workspace: X, columns or lists as qt_mix24_gather leaves them, sums of outliers, X
 * as qt_prepare_run does. */
struct workspace {
    size_t rows, columns, lists, sums, prepared, bytes;
};

/* Tokens of a column of X. */
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
    at.prepared = at.sums + (sums ? (size_t)p->grid_x * 2 * tile * 4 : 0);
    at.bytes = at.prepared + qt_prepare_bytes(p);
    return at;
}

/* Lists in boxes of one unit of so many strips. */
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
        return qt_refuse(p, QTOOL_UNSUPPORTED, "too many tokens");
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
