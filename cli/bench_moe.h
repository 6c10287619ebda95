/* bench --moe (bench_moe.c): parts of cmd_bench.c for layers of experts. */
#ifndef QT_CLI_BENCH_MOE_H
#define QT_CLI_BENCH_MOE_H

#include "cli/cli.h"

/* Parses EXPERTS,TOPK,HIDDEN,INTERMEDIATE or a name. */
int bench_moe_parse(struct qt_bench_moe *out, const char *text, struct qt_err *err);
/* Prints the rows of experts. names: the specs as given. */
int bench_moe_print(const struct qt_bench_report *report, const char **names,
                    const struct qt_spec *specs, struct qt_err *err);
/* The same as a JSON array. */
json_t *bench_moe_doc(struct cli *cli, const struct qt_bench_report *report, const char **names,
                      const struct qt_spec *specs);

#endif
