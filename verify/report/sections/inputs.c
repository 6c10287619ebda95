/* What the report was made from. */
#include "verify/report/report.h"

#include <stdio.h>

static const struct column columns[] = {
    {"path", "input", NULL},      {"kind", "kind", NULL},   {"crc32", "CRC-32", NULL},
    {"made_by", "made by", NULL}, {"about", "about", NULL},
};

static void add_container(struct table *t, const struct subject *s)
{
    const json_t *identity = json_object_get(qt_container_manifest(s->container), "identity");
    const char *version = member_text(json_object_get(identity, "tool"), "version");
    char by[64] = "";
    snprintf(by, sizeof by, "qtool %.40s", version ? version : "");
    row_begin(t);
    cell_text(t, s->path);
    cell_text(t, "container");
    cell_text(t, s->crc);
    cell_text(t, by);
    cell_text(t, member_text(json_object_get(identity, "options"), "scheme"));
}

static void add_document(struct table *t, const struct qt_report *r, const struct document *d)
{
    static const char *const kinds[] = {"results of eval", "results of verify", "results of bench"};
    char by[64] = "";
    snprintf(by, sizeof by, "qtool %.40s", member_text(d->json, "qtool"));
    row_begin(t);
    cell_text(t, d->path);
    cell_text(t, kinds[d->kind]);
    cell_text(t, member_text(d->json, "manifest_crc32"));
    cell_text(t, by);
    cell_text(t, d->kind == DOCUMENT_BENCH ? member_text(json_object_get(d->json, "gpu"), "name")
                                           : r->subjects[d->subject].label);
}

static int write(struct page *p, const struct qt_report *r, struct qt_err *err)
{
    struct table t;
    (void)err;
    TABLE_BEGIN(&t, "Inputs. The CRC-32 is that of the container's manifest", columns);
    for (size_t i = 0; i < r->nsubjects; i++)
        if (r->subjects[i].container)
            add_container(&t, &r->subjects[i]);
    for (size_t i = 0; i < r->ndocuments; i++)
        add_document(&t, r, &r->documents[i]);
    for (size_t i = 0; i < r->nqcals; i++) {
        char crc[16];
        snprintf(crc, sizeof crc, "%08x", qt_qcal_crc(r->qcals[i]));
        row_begin(&t);
        cell_text(&t, qt_qcal_path(r->qcals[i]));
        cell_text(&t, "calibration file");
        cell_text(&t, crc);
        cell_text(&t, NULL);
        cell_text(&t, qt_qcal_info(r->qcals[i])->family);
    }
    page_table(p, &t, false);
    return QT_OK;
}

const struct section section_inputs = {"inputs", "Inputs", write};
