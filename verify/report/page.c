/* The page: head, list of sections, sections, JSON. */
#include "verify/report/report.h"
#include "verify/report/style.h"

#include <nettle/base64.h>
#include <nettle/sha2.h>

static const struct section *const sections[] = {
    &section_choice,  &section_compare, &section_quantiles, &section_gates,       &section_errors,
    &section_experts, &section_bits,    &section_weights,   &section_activations, &section_learning,
    &section_time,    &section_speed,   &section_models,    &section_inputs,
};
enum { SECTIONS = sizeof sections / sizeof *sections };

/* Permits the page's own script by its hash and nothing else: if a name got through as markup, it
 * would be dead. */
static void write_policy(struct text *t)
{
    struct sha256_ctx sha;
    uint8_t digest[SHA256_DIGEST_SIZE];
    char text[BASE64_ENCODE_RAW_LENGTH(SHA256_DIGEST_SIZE) + 1] = "";
    sha256_init(&sha);
    sha256_update(&sha, strlen(report_script), (const uint8_t *)report_script);
    sha256_digest(&sha, sizeof digest, digest);
    base64_encode_raw(text, sizeof digest, digest);
    html(t,
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
         "style-src 'unsafe-inline'; script-src 'sha256-%s'\">\n",
         text);
}

static void write_head(struct text *t, const struct qt_report *r)
{
    html(t, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    write_policy(t);
    html(t,
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n"
         "<meta name=\"generator\" content=\"qtool %s\">\n<title>",
         QT_VERSION);
    for (size_t i = 0; i < r->nsubjects && i < 3; i++)
        html(t, "%s%s", i ? ", " : "", r->subjects[i].label);
    html(t, "%sqtool report</title>\n<style>", r->nsubjects ? " \u2013 " : "");
    text_put(t, report_style, strlen(report_style));
    html(t, "</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#main\">Skip to content</a>\n"
            "<header><h1>Quantization report</h1>");
}

static void write_navigation(struct text *t, const struct page *pages)
{
    html(t, "<nav aria-label=\"Sections\"><ul>");
    for (size_t i = 0; i < SECTIONS; i++)
        if (pages[i].text.size)
            html(t, "<li><a href=\"#%s\">%s</a></li>", sections[i]->id, sections[i]->title);
    html(t, "</ul></nav></header>\n<main id=\"main\">\n");
}

static void write_sections(struct text *t, const struct page *pages)
{
    for (size_t i = 0; i < SECTIONS; i++) {
        if (!pages[i].text.size)
            continue;
        html(t, "<section id=\"%s\" aria-labelledby=\"%s-title\"><h2 id=\"%s-title\">%s</h2>\n",
             sections[i]->id, sections[i]->id, sections[i]->id, sections[i]->title);
        text_put(t, pages[i].text.data, pages[i].text.size);
        html(t, "</section>\n");
    }
}

/* Everything that the tables show, and the ids of the sections. */
static int write_json(struct text *t, json_t *ids, const struct page *pages, struct qt_err *err)
{
    json_t *list = json_array();
    bool failed = !list || !ids;
    for (size_t i = 0; i < SECTIONS; i++) {
        if (!pages[i].text.size)
            continue;
        failed |= json_array_append_new(ids, json_string(sections[i]->id)) < 0;
        failed |= json_array_append_new(list, json_pack("{s:s, s:s, s:O}", "id", sections[i]->id,
                                                        "title", sections[i]->title, "tables",
                                                        pages[i].tables)) < 0;
    }
    json_t *doc = json_pack("{s:s, s:s, s:i, s:o}", "format", "qtool-report-page", "qtool",
                            QT_VERSION, "version", 1, "sections", list);
    failed |= !doc;
    if (!failed) {
        html(t, "<script type=\"application/json\" id=\"data\">");
        text_json(t, doc);
        html(t, "</script>\n");
    }
    json_decref(doc);
    return failed ? qt_no_memory(err, NULL) : QT_OK;
}

int qt_report_html(char **text, size_t *size, json_t **ids, const struct qt_report *r,
                   struct qt_err *err)
{
    struct page pages[SECTIONS] = {0};
    json_t *list = json_array();
    struct text t = {0};
    unsigned charts = 0;
    int rc;
    *text = NULL;
    if (ids)
        *ids = NULL;
    for (size_t i = 0; i < SECTIONS; i++) {
        pages[i].charts = charts;
        pages[i].tables = json_array();
        pages[i].failed = !pages[i].tables;
        QT_TRY(sections[i]->write(&pages[i], r, err));
        charts = pages[i].charts;
        t.failed |= pages[i].failed || pages[i].text.failed;
    }
    write_head(&t, r);
    write_navigation(&t, pages);
    write_sections(&t, pages);
    html(&t,
         "</main>\n<footer>Made by qtool %s from saved results; nothing was measured for this "
         "page.</footer>\n",
         QT_VERSION);
    QT_TRY(write_json(&t, list, pages, err));
    html(&t, "<script>");
    text_put(&t, report_script, strlen(report_script));
    html(&t, "</script>\n</body>\n</html>\n");
    if (t.failed)
        QT_TRY(qt_fail(err, QT_E_RESOURCE, NULL, NULL, "out of memory for the report"));
    *text = t.data;
    *size = t.size;
    t.data = NULL;
    if (ids)
        *ids = json_incref(list);
done:
    for (size_t i = 0; i < SECTIONS; i++) {
        text_free(&pages[i].text);
        json_decref(pages[i].tables);
    }
    text_free(&t);
    json_decref(list);
    return rc;
}
