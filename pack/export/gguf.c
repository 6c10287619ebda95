/*
 * gguf: files of llama.cpp and what is built on it (Ollama, LM Studio). A file has the sizes of the
 * model and its tokenizer, too, so nothing else is written: model.gguf, or, if it is split,
 * model-00001-of-0000N.gguf, of which the first has all keys.
 *
 * Integers become blocks of 32 weights, each with its scale: larger groups repeat theirs.
 */
#include "pack/export/gguf_plan.h"

#include <string.h>

static enum qt_export_fit fit(const char **why, const struct qt_spec *spec)
{
    enum qt_export_fit out;
    qt_gguf_type_of(&out, why, spec);
    return out;
}

static bool has_family(const char *family)
{
    return qt_gguf_arch_find(family) && qt_gguf_family_find(family);
}

static int describe(struct qt_export_matrix *m, struct qt_err *err)
{
    if (m->k % QT_GGUF_BLOCK == 0)
        return QT_OK;
    return qt_fail(
        err, QT_E_UNSUPPORTED, NULL, NULL,
        "%zu channels are no multiple of %d; a rule 'NAME=none' leaves the tensor as it is", m->k,
        QT_GGUF_BLOCK);
}

/* ---- files ---------------------------------------------------------------------------------- */

static void put_info(struct qt_gguf_bytes *b, const struct tensor *t, uint64_t offset)
{
    const uint64_t slices = t->latent.rank ? t->heads : t->slices;
    const uint64_t dims[3] = {t->k, t->rows ? t->rows : slices, slices};
    const uint32_t ndim = 1u + (t->rows > 0) + t->stacked;
    qt_gguf_text(b, t->name, strlen(t->name));
    qt_gguf_raw(b, &ndim, sizeof ndim);
    qt_gguf_raw(b, dims, ndim * sizeof *dims);
    qt_gguf_raw(b, &t->type->id, sizeof t->type->id);
    qt_gguf_raw(b, &offset, sizeof offset);
}

/* The header of file number i; *data: bytes of what follows. */
static int make_header(struct qt_gguf_bytes *b, uint64_t *data, const struct gguf *g, size_t i)
{
    static const char zeros[QT_GGUF_ALIGN];
    const uint32_t version = 3;
    const uint64_t tensors = g->first[i + 1] - g->first[i];
    const uint64_t keys = (i == 0 ? g->keys.keys : 0) + (g->files > 1 ? 3 : 0);
    qt_gguf_raw(b, "GGUF", 4);
    qt_gguf_raw(b, &version, sizeof version);
    qt_gguf_raw(b, &tensors, sizeof tensors);
    qt_gguf_raw(b, &keys, sizeof keys);
    if (i == 0)
        qt_gguf_raw(b, g->keys.data, g->keys.size);
    if (g->files > 1) {
        qt_gguf_u16(b, "split.no", (uint16_t)i);
        qt_gguf_u16(b, "split.count", (uint16_t)g->files);
        qt_gguf_i32(b, "split.tensors.count", (int32_t)g->count);
    }
    *data = 0;
    for (size_t k = g->first[i]; k < g->first[i + 1]; k++) {
        put_info(b, &g->tensors[k], *data);
        *data += qt_gguf_padded(g->tensors[k].bytes);
    }
    qt_gguf_raw(b, zeros, (size_t)(qt_gguf_padded(b->size) - b->size));
    return b->rc;
}

static int write_file(struct qt_export *x, const struct gguf *g, size_t i, struct qt_err *err)
{
    struct qt_gguf_bytes header = {.err = err};
    char name[QT_WEIGHT_FILE_NAME];
    uint64_t data;
    int rc;
    qt_weight_file_name(name, i, g->files, "gguf");
    QT_TRY(make_header(&header, &data, g, i));
    QT_TRY(qt_output_create(x->out, name, header.size + data, err));
    QT_TRY(qt_output_write(x->out, header.data, header.size, err));
    for (size_t k = g->first[i]; k < g->first[i + 1]; k++) {
        QT_TRY(qt_gguf_write_tensor(x, &g->tensors[k], err));
        qt_log_progress(x->opt->log, "export", (double)(k + 1), (double)g->count);
    }
    QT_TRY(qt_output_end(x->out, err));
done:
    qt_free(header.data);
    return rc;
}

static int write_files(struct qt_export *x, struct qt_err *err)
{
    const struct gguf *g = x->own;
    int rc = QT_OK;
    for (size_t i = 0; i < g->files && rc == QT_OK; i++)
        rc = write_file(x, g, i, err);
    return rc;
}

const struct qt_export_format qt_export_gguf = {
    .name = "gguf",
    .help = "one file with tokenizer; integers in blocks of 32",
    .runtimes = "llama.cpp, Ollama, LM Studio",
    .embeddings = true,
    .scale_dtype = QT_F16,
    .fit = fit,
    .has_family = has_family,
    .describe = describe,
    .plan = qt_gguf_plan,
    .write = write_files,
    .release = qt_gguf_release,
};
