/*
 * Writing calibration files. The header is planned first, with zeros for the CRCs; tensors are
 * written at their offsets in any order; the header is written last, when the CRCs are known. Each
 * CRC is a fixed number of digits, so that the header's size does not change.
 */
#include "formats/qcal_internal.h"
#include "formats/writer_internal.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

struct qt_qcal_writer {
    char *path, *partial;
    bool force;
    int fd; /* of the locked PATH.partial, or -1 */
    json_t *doc;
    struct qt_tensor *tensors;
    char (*names)[QT_QCAL_NAME];
    size_t count;
    uint64_t *offsets; /* [count + 1] */
    uint32_t *crcs;
    bool *written;
    struct qt_qcal_layers layers;
};

/* ---- JSON document -------------------------------------------------------------------------- */

static json_t *part_json(const struct qt_qcal_part *p)
{
    json_t *data = json_array();
    for (size_t i = 0; i < p->ndata; i++)
        if (json_array_append_new(data, qt_json_name(qt_base_name(p->data[i]))) < 0) {
            json_decref(data);
            return NULL;
        }
    return json_pack("{s:I, s:I, s:I, s:b, s:o, s:o}", "samples", (json_int_t)p->samples, "seqlen",
                     (json_int_t)p->seqlen, "seed", (json_int_t)p->seed, "bos", p->bos, "ids_crc32",
                     qt_crc_json(p->ids_crc), "data", data);
}

static json_t *widths_json(const struct qt_qcal_info *info)
{
    json_t *rows = json_array();
    int failed = 0;
    for (size_t l = 0; l < info->layers; l++) {
        json_t *row = json_array();
        for (size_t i = 0; i < info->layer[l].inputs; i++)
            failed |= json_array_append_new(row, json_integer((json_int_t)info->layer[l].k[i]));
        failed |= json_array_append_new(rows, row);
    }
    if (!failed)
        return rows;
    json_decref(rows);
    return NULL;
}

/* Adds the member `experts`, which version 1 does not have. */
static int add_experts(json_t *doc, const struct qt_qcal_info *info, struct qt_err *err)
{
    json_t *counts = json_array();
    int failed = 0;
    for (size_t l = 0; l < info->layers; l++)
        failed |= json_array_append_new(counts, json_integer((json_int_t)info->layer[l].experts));
    failed |= json_object_set_new(json_object_get(doc, "model"), "experts", counts);
    return failed ? qt_no_memory(err, NULL) : QT_OK;
}

/* Makes the document without the CRCs. */
static int doc_new(json_t **out, const struct qt_qcal_info *info, struct qt_err *err)
{
    const int version = qt_qcal_version(info->layer, info->layers);
    json_t *parts = json_array();
    size_t tokens = 0;
    int failed = 0;
    if (info->nparts > QT_QCAL_PARTS) {
        json_decref(parts);
        return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL, "calibration of more than %d parts",
                       QT_QCAL_PARTS);
    }
    for (size_t i = 0; i < info->nparts; i++) {
        const struct qt_qcal_part *p = &info->parts[i];
        size_t n;
        if (qt_mul_overflow(&n, p->samples, p->seqlen) || qt_add_overflow(&tokens, tokens, n) ||
            tokens > UINT32_MAX) {
            json_decref(parts);
            return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                           "calibration on more than 2^32 - 1 tokens");
        }
        failed |= json_array_append_new(parts, part_json(p));
    }
    *out =
        json_pack("{s:s, s:i, s:{s:s, s:s}, s:{s:s, s:I, s:I, s:o, s:o}, s:I, s:O}", "format",
                  QT_QCAL_FORMAT, "version", version, "tool", "name", "qtool", "version",
                  QT_VERSION, "model", "family", info->family, "layers", (json_int_t)info->layers,
                  "hidden", (json_int_t)info->hidden, "sample_crc32", qt_crc_json(info->sample_crc),
                  "k", widths_json(info), "tokens", (json_int_t)tokens, "parts", parts);
    json_decref(parts);
    if (failed || !*out)
        return qt_no_memory(err, NULL);
    return version > 1 ? add_experts(*out, info, err) : QT_OK;
}

/* Makes the file header with the current CRCs. */
static int header_new(char **out, size_t *size, struct qt_qcal_writer *w, struct qt_err *err)
{
    json_t *metadata = json_object(), *crcs = json_object();
    char *text = NULL;
    size_t length;
    int rc, failed = 0;
    *out = NULL;
    for (size_t i = 0; i < w->count; i++)
        failed |= json_object_set_new(crcs, w->tensors[i].name, qt_crc_json(w->crcs[i]));
    failed |= json_object_set(w->doc, "crc32", crcs);
    QT_TRY(failed ? qt_no_memory(err, NULL)
                  : qt_json_text(&text, &length, w->doc, JSON_COMPACT, err));
    if (json_object_set_new(metadata, QT_QCAL_KEY, json_string(text)) < 0) {
        rc = qt_no_memory(err, NULL);
        goto done;
    }
    QT_TRY(qt_safetensors_header(out, size, w->offsets, w->tensors, w->count, metadata, err));
done:
    qt_free(text);
    json_decref(crcs);
    json_decref(metadata);
    return rc;
}

/* ---- file ----------------------------------------------------------------------------------- */

static int check_target(const char *path, bool force, struct qt_err *err)
{
    struct stat st;
    if (!qt_qcal_probe(path) || !qt_name_is_plain(qt_base_name(path)))
        return qt_fail(err, QT_E_USAGE, path, NULL,
                       "the name of a calibration file must end in .qcal");
    if (lstat(path, &st) < 0)
        return QT_OK;
    if (!S_ISREG(st.st_mode))
        return qt_fail(err, QT_E_USAGE, path, NULL, "exists and is not a file");
    return force ? QT_OK
                 : qt_fail(err, QT_E_USAGE, path, NULL, "exists already; --force replaces it");
}

/* First bytes of PATH.partial until it is complete. They are not those of a safetensors file. */
static const char mark[] = "qtool is writing a calibration file\n";

/* True if the file was left by a killed run: no other file may be overwritten, nor a complete one
 * that its run could not rename. */
static bool is_ours(int fd, const struct stat *st)
{
    char start[sizeof mark - 1];
    return S_ISREG(st->st_mode) && st->st_nlink == 1 &&
           (st->st_size == 0 || (pread(fd, start, sizeof start, 0) == (ssize_t)sizeof start &&
                                 memcmp(start, mark, sizeof start) == 0));
}

static int not_ours(const struct qt_qcal_writer *w, struct qt_err *err)
{
    return qt_fail(
        err, QT_E_USAGE, w->partial, NULL,
        "not replaced: it is not the unfinished file of an earlier run; rename or remove "
        "it");
}

/* Opens PATH.partial: a new file, or that of a killed run. */
static int create_partial(struct qt_qcal_writer *w, struct qt_err *err)
{
    struct qt_err why = {0};
    int rc = qt_file_create_new(&w->fd, w->partial, 0666, &why);
    if (rc == QT_OK)
        return rc;
    if (errno != EEXIST)
        return qt_fail(err, rc, w->partial, NULL, "%s", why.reason);
    rc = qt_file_open(&w->fd, w->partial, err);
    return rc < 0 && errno == ELOOP ? not_ours(w, err) : rc;
}

/* Checks and truncates PATH.partial only after locking it: another process may be writing it. That
 * process may also have renamed the file between open and lock. */
static int open_partial(struct qt_qcal_writer *w, struct qt_err *err)
{
    struct stat mine, now;
    int rc;
    QT_TRY(create_partial(w, err));
    QT_TRY(qt_outdir_lock(w->fd, w->partial, err));
    if (fstat(w->fd, &mine) < 0 || lstat(w->partial, &now) < 0 || mine.st_ino != now.st_ino ||
        mine.st_dev != now.st_dev)
        rc = qt_fail(err, QT_E_RESOURCE, w->partial, NULL, "in use by another process");
    else if (!is_ours(w->fd, &mine))
        rc = not_ours(w, err);
    else if (ftruncate(w->fd, 0) < 0)
        rc = qt_fail(err, QT_E_RESOURCE, w->partial, NULL, "cannot truncate");
    if (rc == QT_OK) {
        rc = qt_file_write_at(w->fd, w->partial, mark, sizeof mark - 1, 0, err);
        if (rc == QT_OK)
            rc = qt_file_reserve(w->fd, w->partial, w->offsets[w->count], err);
        if (rc < 0)
            unlink(w->partial);
    }
done:
    if (rc < 0 && w->fd >= 0) { /* another process owns the file: do not remove it */
        close(w->fd);
        w->fd = -1;
    }
    return rc;
}

static int plan(struct qt_qcal_writer *w, const struct qt_qcal_info *info, struct qt_err *err)
{
    char *header = NULL;
    size_t size;
    int rc;
    QT_TRY(qt_qcal_layers_new(&w->layers, info->layer, info->layers, err));
    w->count = w->layers.first[info->layers];
    QT_TRY(qt_array_new(&w->tensors, w->count, sizeof *w->tensors, err));
    QT_TRY(qt_array_new(&w->names, w->count, sizeof *w->names, err));
    QT_TRY(qt_array_new(&w->offsets, w->count + 1, sizeof *w->offsets, err));
    QT_TRY(qt_array_new(&w->crcs, w->count, sizeof *w->crcs, err));
    QT_TRY(qt_array_new(&w->written, w->count, sizeof *w->written, err));
    for (size_t i = 0; i < w->count; i++)
        QT_TRY(qt_qcal_describe(&w->tensors[i], w->names[i], i, &w->layers, w->path, err));
    QT_TRY(doc_new(&w->doc, info, err));
    QT_TRY(header_new(&header, &size, w, err));
done:
    qt_free(header);
    return rc;
}

int qt_qcal_create(struct qt_qcal_writer **out, const char *path, const struct qt_qcal_info *info,
                   bool force, struct qt_err *err)
{
    struct qt_qcal_writer *w = NULL;
    int rc;
    *out = NULL;
    QT_TRY(check_target(path, force, err));
    QT_TRY(qt_array_new(&w, 1, sizeof *w, err));
    w->fd = -1;
    w->force = force;
    QT_TRY(qt_string_copy(&w->path, path, err));
    QT_TRY(qt_string_format(&w->partial, err, "%s.partial", path));
    QT_TRY(plan(w, info, err));
    QT_TRY(open_partial(w, err));
    *out = w;
done:
    if (rc < 0)
        qt_qcal_abandon(w);
    return rc;
}

void qt_qcal_abandon(struct qt_qcal_writer *w)
{
    if (!w)
        return;
    if (w->fd >= 0) {
        unlink(w->partial); /* while it is locked */
        close(w->fd);
    }
    json_decref(w->doc);
    qt_qcal_layers_free(&w->layers);
    qt_free(w->written);
    qt_free(w->crcs);
    qt_free(w->offsets);
    qt_free(w->names);
    qt_free(w->tensors);
    qt_free(w->partial);
    qt_free(w->path);
    qt_free(w);
}

/* ---- tensors -------------------------------------------------------------------------------- */

/* Writes the next piece of tensor i at *offset and advances it. */
static int put_piece(struct qt_qcal_writer *w, size_t i, const void *data, size_t size,
                     uint64_t *offset, struct qt_err *err)
{
    w->crcs[i] = qt_crc32(w->crcs[i], data, size);
    int rc = qt_file_write_at(w->fd, w->partial, data, size, *offset, err);
    *offset += size;
    return rc;
}

static int put_tensor(struct qt_qcal_writer *w, size_t i, const void *data, struct qt_err *err)
{
    uint64_t at = w->offsets[i];
    return put_piece(w, i, data, (size_t)(w->offsets[i + 1] - at), &at, err);
}

/* Error for a non-finite value in tensor i. */
static int not_finite(const struct qt_qcal_writer *w, size_t i, size_t channel, const char *whose,
                      struct qt_err *err)
{
    const struct qt_qcal_place p = qt_qcal_place(&w->layers, i);
    return qt_fail(err, QT_E_INPUT, whose, NULL,
                   "layer %zu, input %zu: sums of channel %zu are not finite: the model's "
                   "activations are NaN or too large",
                   p.layer, p.input, channel);
}

/* Writes the lower triangle row by row in FP32. */
static int put_hessian(struct qt_qcal_writer *w, size_t i, const double *h, size_t k,
                       const char *whose, struct qt_err *err)
{
    uint64_t at = w->offsets[i];
    float *row;
    int rc = qt_array_new(&row, k, sizeof *row, err);
    for (size_t r = 0; rc == QT_OK && r < k; r++) {
        for (size_t c = 0; c <= r; c++)
            row[c] = (float)h[r * k + c];
        rc = qt_find_nonfinite(row, r + 1) <= r
                 ? not_finite(w, i, r, whose, err)
                 : put_piece(w, i, row, (r + 1) * sizeof *row, &at, err);
    }
    qt_free(row);
    return rc;
}

int qt_qcal_put(struct qt_qcal_writer *w, size_t layer, size_t input, const double *h,
                const struct qt_channels *c, const char *whose, struct qt_err *err)
{
    const bool planned = layer < w->layers.count && input < w->layers.layer[layer].inputs;
    const size_t first = planned ? qt_qcal_index(&w->layers, layer, input, 0) : 0;
    int rc;
    if (!planned || w->written[first])
        return qt_fail(err, QT_E_INTERNAL, w->path, NULL, "input %zu of layer %zu: %s", input,
                       layer, planned ? "written twice" : "not planned");
    const size_t k = w->layers.layer[layer].k[input];
    for (size_t j = 0; j < k; j++)
        if (!isfinite(c->sum2[j]))
            return not_finite(w, first, j, whose, err);
    QT_TRY(put_tensor(w, first + QT_QCAL_SUM2, c->sum2, err));
    QT_TRY(put_tensor(w, first + QT_QCAL_HIST, c->hist, err));
    QT_TRY(put_tensor(w, first + QT_QCAL_ABSMAX, c->absmax, err));
    QT_TRY(put_hessian(w, first + QT_QCAL_H, h, k, whose, err));
    for (size_t i = 0; i < QT_QCAL_KINDS; i++)
        w->written[first + i] = true;
done:
    return rc;
}

int qt_qcal_put_routed(struct qt_qcal_writer *w, size_t layer, const uint32_t *routed,
                       struct qt_err *err)
{
    const size_t i = qt_qcal_routed_index(&w->layers, layer);
    int rc = put_tensor(w, i, routed, err);
    w->written[i] = rc == QT_OK;
    return rc;
}

static void close_partial(struct qt_qcal_writer *w)
{
    close(w->fd); /* already synced; unlocks */
    w->fd = -1;
}

/* If a conflict appeared during the run, keeps both the existing file and PATH.partial. */
static int publish(struct qt_qcal_writer *w, struct qt_err *err)
{
    struct qt_err why = {0};
    if (check_target(w->path, w->force, &why) < 0) {
        close_partial(w);
        return qt_fail(err, QT_E_RESOURCE, w->path, NULL,
                       "%s (since the run began); the calibration file is complete in %s",
                       why.reason, w->partial);
    }
    int rc = qt_path_rename(w->partial, w->path, err);
    if (rc == QT_OK)
        close_partial(w);
    return rc;
}

int qt_qcal_finish(struct qt_qcal_writer *w, struct qt_err *err)
{
    char *header = NULL, *parent = NULL;
    size_t size = 0;
    const char *name = qt_base_name(w->path);
    int rc;
    for (size_t i = 0; i < w->count; i++)
        if (!w->written[i])
            return qt_fail(err, QT_E_INTERNAL, w->path, w->tensors[i].name, "was never written");
    uint64_t data = w->offsets[0];
    QT_TRY(header_new(&header, &size, w, err));
    if (size != data)
        rc = qt_fail(err, QT_E_INTERNAL, w->path, NULL, "the size of the header changed");
    if (rc < 0)
        goto done;
    QT_TRY(qt_file_write_at(w->fd, w->partial, header, size, 0, err));
    QT_TRY(name == w->path
               ? qt_string_copy(&parent, ".", err)
               : qt_string_format(&parent, err, "%.*s", (int)(name - w->path), w->path));
    if (fsync(w->fd) < 0) {
        rc = qt_fail(err, QT_E_RESOURCE, w->partial, NULL, "cannot sync: %s", strerror(errno));
        goto done;
    }
    QT_TRY(publish(w, err));
    QT_TRY(qt_dir_sync(parent, err));
done:
    qt_free(header);
    qt_free(parent);
    return rc;
}
