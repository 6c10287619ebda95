/* bench --moe: shapes of layers of experts, and the table and document of their times. */
#include "cli/bench.h"

#include <math.h>
#include <string.h>

enum { MAX_EXPERTS = QTOOL_MOE_MAX_EXPERTS, MAX_TOPK = 32, MAX_SIDE = 1 << 17 };

static const struct qt_bench_moe named[] = {
    {"qwen3-30b", 128, 8, 2048, 768},
    {"mixtral", 8, 2, 4096, 14336},
    {"deepseek-v3", 256, 8, 7168, 2048},
    {"glm-4.5-air", 128, 8, 4096, 1408},
};
enum { NAMED = sizeof named / sizeof *named };

int bench_moe_parse(struct qt_bench_moe *out, const char *text, struct qt_err *err)
{
    const char *names[NAMED];
    char word[4][24];
    int end = 0, rc = QT_OK;
    *out = (struct qt_bench_moe){.name = ""};
    for (size_t i = 0; i < NAMED; i++) {
        names[i] = named[i].name;
        if (strcmp(text, named[i].name) == 0) {
            *out = named[i];
            return QT_OK;
        }
    }
    if (sscanf(text, "%23[0-9],%23[0-9],%23[0-9],%23[0-9]%n", word[0], word[1], word[2], word[3],
               &end) != 4 ||
        text[end] != '\0')
        return opts_unknown("layer of experts", text, names, NAMED, err);
    QT_TRY(opts_size(&out->experts, "--moe", word[0], 1, MAX_EXPERTS, err));
    QT_TRY(opts_size(&out->topk, "--moe", word[1], 1,
                     out->experts < MAX_TOPK ? out->experts : MAX_TOPK, err));
    QT_TRY(opts_size(&out->hidden, "--moe", word[2], 1, MAX_SIDE, err));
    QT_TRY(opts_size(&out->inner, "--moe", word[3], 1, MAX_SIDE, err));
done:
    return rc;
}

static double gbs(const struct qt_bench_moe_row *row)
{
    return (double)row->bytes / row->us / 1e3;
}

/* The faster of the two ways in which cuBLAS computes the products; NaN without cuBLAS. */
static double cublas_us(const struct qt_bench_moe_row *row)
{
    return fmin(row->loop_us, row->batch_us);
}

static const char *cublas_way(const struct qt_bench_moe_row *row)
{
    return isnan(cublas_us(row)) ? "" : row->loop_us < row->batch_us ? "loop" : "batch";
}

int bench_moe_print(const struct qt_bench_report *report, const struct bench_request *r,
                    struct qt_err *err)
{
    struct table t = {.align = "llrrrrrrrl"};
    table_row(&t, "EXPERTS,TOP,HIDDEN,INNER\tSCHEME\tM\tREAD\tMB\tUS\tFLOOR\t%%FLOOR\tX CUBLAS\t");
    for (size_t i = 0; i < report->nmoe; i++) {
        const struct qt_bench_moe_row *row = &report->moe[i];
        const struct qt_bench_moe *s = row->shape;
        char shape[TEXT_SIZE], speed[TEXT_SIZE] = "";
        const char *name = r->names[row->spec - r->specs];
        snprintf(shape, sizeof shape, "%zu,%zu,%zu,%zu", s->experts, s->topk, s->hidden, s->inner);
        if (row->why[0]) {
            table_row(&t, "%s\t%s\t%zu\t\t\t\t\t\t\trefused: %s", shape, name, row->m, row->why);
            continue;
        }
        if (!isnan(cublas_us(row)))
            snprintf(speed, sizeof speed, "%.2f", cublas_us(row) / row->us);
        table_row(&t, "%s\t%s\t%zu\t%zu\t%.1f\t%.1f\t%.1f\t%.1f\t%s\t%s", shape, name, row->m,
                  row->touched, (double)row->bytes / 1e6, row->us, row->floor_us,
                  100 * row->floor_us / row->us, speed, cublas_way(row));
    }
    return table_print(&t, err);
}

json_t *bench_moe_doc(struct cli *cli, const struct qt_bench_report *report,
                      const struct bench_request *r)
{
    json_t *rows = json_array();
    for (size_t i = 0; i < report->nmoe; i++) {
        const struct qt_bench_moe_row *row = &report->moe[i];
        json_t *o = json_object();
        doc_set(cli, o, "scheme", doc_text(r->names[row->spec - r->specs]));
        doc_set(cli, o, "shape_name", doc_text(row->shape->name[0] ? row->shape->name : NULL));
        doc_set(cli, o, "experts", doc_size(row->shape->experts));
        doc_set(cli, o, "topk", doc_size(row->shape->topk));
        doc_set(cli, o, "hidden", doc_size(row->shape->hidden));
        doc_set(cli, o, "intermediate", doc_size(row->shape->inner));
        doc_set(cli, o, "m", doc_size(row->m));
        doc_set(cli, o, "experts_read", doc_size(row->touched));
        doc_set(cli, o, "refused", doc_text(row->why[0] ? row->why : NULL));
        doc_set(cli, o, "bytes", doc_size(row->bytes));
        doc_set(cli, o, "us", doc_real(row->us));
        doc_set(cli, o, "gb_per_s", doc_real(gbs(row)));
        doc_set(cli, o, "floor_us", doc_real(row->floor_us));
        doc_set(cli, o, "floor_share", doc_real(row->floor_us / row->us));
        doc_set(cli, o, "cublas_loop_us", doc_real(row->loop_us));
        doc_set(cli, o, "cublas_batch_us", doc_real(row->batch_us));
        doc_append(cli, rows, o);
    }
    return rows;
}
