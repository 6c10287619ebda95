/*
 * Calibration files: safetensors files with a JSON document in the metadata. Opening checks the
 * document against the tensors; values are checked when they are read, as a file can be larger than
 * memory.
 */
#include "formats/qcal_internal.h"
#include "formats/writer_internal.h"

#include <stdlib.h>

struct qt_qcal {
    struct qt_shard shard;
    json_t *doc; /* owns the strings below */
    uint32_t crc;
    struct qt_qcal_info info;
    struct qt_qcal_layers layers;
    struct qt_qcal_part *parts;
    const char **names; /* names of the data files of all parts */
    uint32_t *crcs;     /* one per tensor */
};

bool qt_qcal_probe(const char *path)
{
    return qt_name_ends_in(qt_base_name(path), ".qcal");
}

int qt_channels_new(struct qt_channels *out, size_t k, struct qt_err *err)
{
    int rc;
    *out = (struct qt_channels){0};
    QT_TRY(qt_array_new(&out->absmax, k, sizeof *out->absmax, err));
    QT_TRY(qt_array_new(&out->sum2, k, sizeof *out->sum2, err));
    QT_TRY(qt_array_new(&out->hist, k, QT_HIST_BINS * sizeof *out->hist, err));
done:
    if (rc < 0)
        qt_channels_free(out);
    return rc;
}

void qt_channels_free(struct qt_channels *c)
{
    qt_free(c->absmax);
    qt_free(c->sum2);
    qt_free(c->hist);
    *c = (struct qt_channels){0};
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static size_t mixer_inputs(const struct qt_qcal_layer *l)
{
    return l->inputs - (l->experts ? 2 * l->experts + 1 : 2);
}

size_t qt_qcal_input_kind(const struct qt_qcal_layer *l, size_t input)
{
    const size_t mixer = mixer_inputs(l);
    return input < mixer ? input + 1 == mixer : 2 + (input - mixer) % 2;
}

void qt_qcal_input_name(char name[QT_QCAL_INPUT_NAME], const struct qt_qcal_layer *l, size_t input)
{
    static const char *const names[QT_INPUTS] = {"attention in", "attention out", "MLP in",
                                                 "MLP down"};
    const size_t kind = qt_qcal_input_kind(l, input), mixer = mixer_inputs(l);
    const int expert = qt_qcal_expert(l, input);
    if (expert >= 0)
        snprintf(name, QT_QCAL_INPUT_NAME, "expert %d %s", expert, kind == 3 ? "down" : "in");
    else if (input > 0 && input < mixer && mixer > 2)
        snprintf(name, QT_QCAL_INPUT_NAME, "mixer %zu", input);
    else
        snprintf(name, QT_QCAL_INPUT_NAME, "%s",
                 l->experts && input + 1 == l->inputs ? "experts in" : names[kind]);
}

/* ---- layers --------------------------------------------------------------------------------- */

int qt_qcal_layers_new(struct qt_qcal_layers *out, const struct qt_qcal_layer *layer, size_t count,
                       struct qt_err *err)
{
    size_t inputs = 0;
    int rc;
    *out = (struct qt_qcal_layers){.count = count};
    for (size_t l = 0; l < count; l++)
        inputs += layer[l].inputs;
    QT_TRY(qt_array_new(&out->layer, count, sizeof *out->layer, err));
    QT_TRY(qt_array_new(&out->first, count + 1, sizeof *out->first, err));
    QT_TRY(qt_array_new(&out->k, inputs, sizeof *out->k, err));
    inputs = 0;
    for (size_t l = 0; l < count; l++) {
        const size_t n = layer[l].inputs;
        out->layer[l] = layer[l];
        out->layer[l].k = memcpy(out->k + inputs, layer[l].k, n * sizeof *out->k);
        out->first[l + 1] = out->first[l] + n * QT_QCAL_KINDS + (layer[l].experts > 0);
        inputs += n;
    }
done:
    return rc;
}

void qt_qcal_layers_free(struct qt_qcal_layers *l)
{
    qt_free(l->layer);
    qt_free(l->first);
    qt_free(l->k);
    *l = (struct qt_qcal_layers){0};
}

int qt_qcal_version(const struct qt_qcal_layer *layer, size_t count)
{
    for (size_t l = 0; l < count; l++)
        if (layer[l].experts || layer[l].inputs != QT_INPUTS)
            return QT_QCAL_VERSION;
    return 1;
}

struct qt_qcal_place qt_qcal_place(const struct qt_qcal_layers *l, size_t i)
{
    size_t low = 0, high = l->count;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        *(l->first[middle] <= i ? &low : &high) = middle;
    }
    const size_t at = i - l->first[low], inputs = l->layer[low].inputs;
    return at / QT_QCAL_KINDS < inputs
               ? (struct qt_qcal_place){low, at / QT_QCAL_KINDS,
                                        (enum qt_qcal_kind)(at % QT_QCAL_KINDS)}
               : (struct qt_qcal_place){low, inputs, QT_QCAL_ROUTED};
}

int qt_qcal_describe(struct qt_tensor *out, char name[QT_QCAL_NAME], size_t i,
                     const struct qt_qcal_layers *l, const char *file, struct qt_err *err)
{
    static const char *const names[] = {"sum2", "hist", "absmax", "h"};
    static const enum qt_dtype dtypes[] = {QT_F64, QT_U32, QT_F32, QT_F32, QT_U32};
    const struct qt_qcal_place p = qt_qcal_place(l, i);
    const struct qt_qcal_layer *layer = &l->layer[p.layer];
    *out = (struct qt_tensor){.name = name, .file = file, .dtype = dtypes[p.kind], .ndim = 1};
    if (p.kind == QT_QCAL_ROUTED) {
        snprintf(name, QT_QCAL_NAME, "layers.%zu.routed", p.layer);
        out->shape[0] = layer->experts;
        return qt_tensor_measure(out, err);
    }
    const size_t width = layer->k[p.input];
    snprintf(name, QT_QCAL_NAME, "layers.%zu.input.%zu.%s", p.layer, p.input, names[p.kind]);
    out->shape[0] = p.kind == QT_QCAL_H ? width * (width + 1) / 2 : width;
    if (p.kind == QT_QCAL_HIST)
        out->shape[out->ndim++] = QT_HIST_BINS;
    return qt_tensor_measure(out, err);
}

/* ---- JSON document -------------------------------------------------------------------------- */

static int bad(const struct qt_qcal *q, struct qt_err *err, const char *what)
{
    return qt_fail(err, QT_E_INPUT, q->shard.path, NULL, "%s", what);
}

/* Parses the hexadecimal digits of a CRC-32; `member` names it in errors. */
static int parse_crc(uint32_t *out, const struct qt_qcal *q, const json_t *value,
                     const char *member, struct qt_err *err)
{
    const char *text = json_string_value(value);
    if (!text || strlen(text) != 8 || strspn(text, "0123456789abcdef") != 8)
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "'%s' must be 8 lower-case hexadecimal digits", member);
    *out = (uint32_t)strtoul(text, NULL, 16);
    return QT_OK;
}

static int check_version(size_t *version, const struct qt_qcal *q, struct qt_err *err)
{
    const char *format = json_string_value(json_object_get(q->doc, "format"));
    if (!format || strcmp(format, QT_QCAL_FORMAT) != 0)
        return bad(q, err, "not a calibration file: its metadata has another 'format'");
    int rc = qt_json_need_size(version, q->doc, "version", q->shard.path, err);
    if (rc == QT_OK && (*version < 1 || *version > QT_QCAL_VERSION))
        rc = qt_fail(err, QT_E_UNSUPPORTED, q->shard.path, NULL,
                     "calibration format %zu is not supported; this qtool reads formats 1 to %d",
                     *version, QT_QCAL_VERSION);
    return rc;
}

/* Counts the inputs of a layer from its row of 'k', and checks their number. */
static int parse_layer(struct qt_qcal_layer *out, const struct qt_qcal *q, size_t version, size_t l,
                       const json_t *row, const json_t *experts, struct qt_err *err)
{
    const json_int_t n = json_integer_value(json_array_get(experts, l));
    *out = (struct qt_qcal_layer){.inputs = json_array_size(row)};
    if (version == 1 && out->inputs != QT_INPUTS)
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "'k' of layer %zu must be %d positive integers", l, QT_INPUTS);
    if (n < 0 || n > QT_QCAL_INPUTS || (experts && !json_is_integer(json_array_get(experts, l))))
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "'experts' of layer %zu must be a number from 0 to %d", l, QT_QCAL_INPUTS);
    out->experts = (size_t)n;
    const size_t mlp = n ? 2 * out->experts + 1 : 2;
    if (out->inputs > QT_QCAL_INPUTS || out->inputs < mlp + 2)
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "'k' of layer %zu must be %zu to %d positive integers", l, mlp + 2,
                       QT_QCAL_INPUTS);
    return QT_OK;
}

static int parse_row(size_t *k, const struct qt_qcal *q, size_t l, const json_t *row,
                     struct qt_err *err)
{
    size_t i;
    json_t *value;
    json_array_foreach (row, i, value) {
        const json_int_t width = json_integer_value(value);
        if (width < 1 || width > INT32_MAX)
            return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                           "'k' of layer %zu must be positive integers", l);
        k[i] = (size_t)width;
    }
    return QT_OK;
}

/* Parses the widths [[k0, k1, ...], ...] and the numbers of experts, one element per layer. */
static int parse_layers(struct qt_qcal *q, size_t version, const json_t *widths,
                        const json_t *experts, struct qt_err *err)
{
    const size_t count = q->info.layers;
    struct qt_qcal_layer *layer = NULL;
    size_t *k = NULL, inputs = 0, tensors = 0;
    int rc;
    if (json_array_size(widths) != count)
        return bad(q, err, "'k' must be an array with an element for each layer");
    if (version == 1)
        experts = NULL;
    else if (json_array_size(experts) != count)
        return bad(q, err, "'experts' must be an array with an element for each layer");
    QT_TRY(qt_array_new(&layer, count, sizeof *layer, err));
    for (size_t l = 0; l < count; l++) {
        QT_TRY(parse_layer(&layer[l], q, version, l, json_array_get(widths, l), experts, err));
        inputs += layer[l].inputs;
        tensors += layer[l].inputs * QT_QCAL_KINDS + (layer[l].experts > 0);
    }
    if (tensors != q->shard.count) {
        rc = qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                     "has %zu tensors, but its %zu layers must have %zu", q->shard.count, count,
                     tensors);
        goto done;
    }
    QT_TRY(qt_array_new(&k, inputs, sizeof *k, err));
    inputs = 0;
    for (size_t l = 0; l < count; l++) {
        layer[l].k = k + inputs;
        QT_TRY(parse_row(k + inputs, q, l, json_array_get(widths, l), err));
        inputs += layer[l].inputs;
    }
    QT_TRY(qt_qcal_layers_new(&q->layers, layer, count, err));
    q->info.layer = q->layers.layer;
done:
    qt_free(k);
    qt_free(layer);
    return rc;
}

static int parse_model(struct qt_qcal *q, size_t version, struct qt_err *err)
{
    const json_t *model = json_object_get(q->doc, "model");
    const char *file = q->shard.path;
    struct qt_qcal_info *info = &q->info;
    int rc;
    QT_TRY(qt_json_need_string(&info->family, model, "family", file, err));
    QT_TRY(qt_json_need_size(&info->layers, model, "layers", file, err));
    QT_TRY(qt_json_need_size(&info->hidden, model, "hidden", file, err));
    QT_TRY(parse_crc(&info->sample_crc, q, json_object_get(model, "sample_crc32"), "sample_crc32",
                     err));
    /* Must precede the allocations that depend on it. */
    if (info->layers == 0 || info->hidden == 0 ||
        info->layers > q->shard.count / (QT_INPUTS * QT_QCAL_KINDS))
        return qt_fail(err, QT_E_INPUT, file, NULL,
                       "has %zu tensors for %zu layers, but each layer must have at least %d",
                       q->shard.count, info->layers, QT_INPUTS * QT_QCAL_KINDS);
    QT_TRY(parse_layers(q, version, json_object_get(model, "k"), json_object_get(model, "experts"),
                        err));
done:
    return rc;
}

/* Stores the names of the data files at *at, and advances it. */
static int parse_part(struct qt_qcal_part *part, const char ***at, const struct qt_qcal *q,
                      const json_t *json, struct qt_err *err)
{
    const char *file = q->shard.path;
    const json_t *data = json_object_get(json, "data");
    size_t tokens, seed = 0;
    int rc;
    QT_TRY(qt_json_need_size(&part->samples, json, "samples", file, err));
    QT_TRY(qt_json_need_size(&part->seqlen, json, "seqlen", file, err));
    QT_TRY(qt_json_need_size(&seed, json, "seed", file, err));
    QT_TRY(parse_crc(&part->ids_crc, q, json_object_get(json, "ids_crc32"), "ids_crc32", err));
    if (!json_is_boolean(json_object_get(json, "bos")))
        return bad(q, err, "'bos' must be true or false");
    part->bos = json_is_true(json_object_get(json, "bos"));
    part->seed = seed;
    part->data = *at;
    part->ndata = json_array_size(data);
    for (size_t i = 0; i < part->ndata; i++)
        if (!(*(*at)++ = json_string_value(json_array_get(data, i))))
            return bad(q, err, "'data' must be an array of strings");
    if (part->ndata == 0)
        return bad(q, err, "'data' must be an array of strings");
    if (part->samples == 0 || part->seqlen == 0 ||
        qt_mul_overflow(&tokens, part->samples, part->seqlen))
        return bad(q, err,
                   "'samples' and 'seqlen' must be positive, and their product must not overflow");
done:
    return rc;
}

/* The number of tokens must fit into the 32-bit counts of a histogram. */
static int check_tokens(struct qt_qcal *q, struct qt_err *err)
{
    size_t sum = 0, stated;
    for (size_t i = 0; i < q->info.nparts; i++) {
        const struct qt_qcal_part *p = &q->parts[i];
        if (qt_add_overflow(&sum, sum, p->samples * p->seqlen) || sum > UINT32_MAX)
            return bad(q, err, "more than 2^32 - 1 tokens");
    }
    int rc = qt_json_need_size(&stated, q->doc, "tokens", q->shard.path, err);
    if (rc == QT_OK && stated != sum)
        rc = qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                     "'tokens' is %zu, but the parts have %zu", stated, sum);
    q->info.tokens = sum;
    return rc;
}

static int parse_parts(struct qt_qcal *q, struct qt_err *err)
{
    const json_t *parts = json_object_get(q->doc, "parts");
    const char **at;
    size_t n = json_array_size(parts), names = 0;
    int rc;
    if (n == 0 || n > QT_QCAL_PARTS)
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "'parts' must be an array of 1 to %d parts", QT_QCAL_PARTS);
    for (size_t i = 0; i < n; i++)
        names += json_array_size(json_object_get(json_array_get(parts, i), "data"));
    QT_TRY(qt_array_new(&q->parts, n, sizeof *q->parts, err));
    QT_TRY(qt_array_new(&q->names, names, sizeof *q->names, err));
    at = q->names;
    for (size_t i = 0; i < n; i++)
        QT_TRY(parse_part(&q->parts[i], &at, q, json_array_get(parts, i), err));
    q->info.parts = q->parts;
    q->info.nparts = n;
    QT_TRY(check_tokens(q, err));
done:
    return rc;
}

/* Tensor i must have the name, dtype and shape that follow from the document. */
static int check_tensor(struct qt_qcal *q, size_t i, const json_t *crcs, struct qt_err *err)
{
    const struct qt_tensor *have = &q->shard.slots[i].info;
    struct qt_tensor want;
    char name[QT_QCAL_NAME];
    int rc = qt_qcal_describe(&want, name, i, &q->layers, q->shard.path, err);
    if (rc < 0)
        return rc;
    if (strcmp(have->name, want.name) != 0)
        return qt_fail(err, QT_E_INPUT, q->shard.path, have->name, "found where '%s' is expected",
                       want.name);
    if (have->dtype != want.dtype || have->ndim != want.ndim ||
        memcmp(have->shape, want.shape, (size_t)want.ndim * sizeof *want.shape) != 0)
        return qt_fail(err, QT_E_INPUT, q->shard.path, have->name,
                       "wrong dtype or shape: %zu elements of %s, but %zu of %s are expected",
                       have->count, qt_dtype_name(have->dtype), want.count,
                       qt_dtype_name(want.dtype));
    return parse_crc(&q->crcs[i], q, json_object_get(crcs, want.name), want.name, err);
}

static int check_tensors(struct qt_qcal *q, struct qt_err *err)
{
    const json_t *crcs = json_object_get(q->doc, "crc32");
    int rc;
    if (json_object_size(crcs) != q->shard.count)
        return bad(q, err, "'crc32' must be an object with a member for each tensor");
    QT_TRY(qt_array_new(&q->crcs, q->shard.count, sizeof *q->crcs, err));
    for (size_t i = 0; i < q->shard.count; i++)
        QT_TRY(check_tensor(q, i, crcs, err));
done:
    return rc;
}

int qt_qcal_open(struct qt_qcal **out, const char *path, struct qt_err *err)
{
    struct qt_qcal *q;
    size_t version;
    int rc;
    *out = NULL;
    if (!qt_qcal_probe(path))
        return qt_fail(err, QT_E_INPUT, path, NULL,
                       "the name of a calibration file must end in .qcal");
    rc = qt_array_new(&q, 1, sizeof *q, err);
    if (rc < 0)
        return rc;
    QT_TRY(qt_shard_open(&q->shard, path, err));
    const json_t *text = json_object_get(q->shard.metadata, QT_QCAL_KEY);
    if (!text) {
        rc = bad(q, err, "not a calibration file: its metadata has no '" QT_QCAL_KEY "'");
        goto done;
    }
    q->crc = qt_crc32(0, json_string_value(text), json_string_length(text));
    QT_TRY(qt_json_parse(&q->doc, json_string_value(text), json_string_length(text), path, err));
    QT_TRY(check_version(&version, q, err));
    QT_TRY(parse_model(q, version, err));
    QT_TRY(parse_parts(q, err));
    QT_TRY(check_tensors(q, err));
    *out = q;
done:
    if (rc < 0)
        qt_qcal_close(q);
    return rc;
}

void qt_qcal_close(struct qt_qcal *q)
{
    if (!q)
        return;
    qt_free(q->crcs);
    qt_free(q->names);
    qt_free(q->parts);
    qt_qcal_layers_free(&q->layers);
    json_decref(q->doc);
    qt_shard_close(&q->shard);
    qt_free(q);
}

const char *qt_qcal_path(const struct qt_qcal *q)
{
    return q->shard.path;
}

const struct qt_qcal_info *qt_qcal_info(const struct qt_qcal *q)
{
    return &q->info;
}

uint32_t qt_qcal_crc(const struct qt_qcal *q)
{
    return q->crc;
}

static int other_model(const struct qt_qcal *q, const char *whose, struct qt_err *err,
                       const char *what, size_t found, size_t expected)
{
    return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                   "made from another model than %s: %s is %zu, not %zu", whose, what, found,
                   expected);
}

int qt_qcal_check_model(const struct qt_qcal *q, const struct qt_qcal_info *model,
                        const char *whose, struct qt_err *err)
{
    const struct qt_qcal_info *info = &q->info;
    if (strcmp(info->family, model->family) != 0)
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "made from another model than %s: the family is %s, not %s", whose,
                       info->family, model->family);
    if (info->layers != model->layers)
        return other_model(q, whose, err, "the number of layers", info->layers, model->layers);
    if (info->hidden != model->hidden)
        return other_model(q, whose, err, "the hidden size", info->hidden, model->hidden);
    for (size_t l = 0; l < info->layers; l++) {
        const struct qt_qcal_layer *have = &info->layer[l], *want = &model->layer[l];
        if (have->experts != want->experts)
            return other_model(q, whose, err, "the number of experts", have->experts,
                               want->experts);
        if (have->inputs != want->inputs)
            return other_model(q, whose, err, "the number of linear inputs of a layer",
                               have->inputs, want->inputs);
        for (size_t i = 0; i < have->inputs; i++)
            if (have->k[i] != want->k[i])
                return other_model(q, whose, err, "the width of a linear layer", have->k[i],
                                   want->k[i]);
    }
    if (info->sample_crc != model->sample_crc)
        return qt_fail(err, QT_E_INPUT, q->shard.path, NULL,
                       "made from another model than %s: the weights differ (fingerprint %08x, not "
                       "%08x)",
                       whose, info->sample_crc, model->sample_crc);
    return QT_OK;
}

/* ---- values --------------------------------------------------------------------------------- */

/* *out = the data of tensor i after a check of its CRC; may be unaligned. */
static int tensor_data(const unsigned char **out, const struct qt_qcal *q, size_t i,
                       struct qt_err *err)
{
    const struct qt_slot *slot = &q->shard.slots[i];
    *out = q->shard.map.data + slot->offset;
    uint32_t crc = qt_crc32(0, *out, slot->info.nbytes);
    if (crc == q->crcs[i])
        return QT_OK;
    return qt_fail(err, QT_E_INPUT, q->shard.path, slot->info.name,
                   "the data's CRC-32 is %08x, the metadata's %08x: the file is damaged", crc,
                   q->crcs[i]);
}

/* Copies tensor i to dst. */
static int read_tensor(void *dst, const struct qt_qcal *q, size_t i, struct qt_err *err)
{
    const unsigned char *data;
    size_t size = q->shard.slots[i].info.nbytes;
    int rc = tensor_data(&data, q, i, err);
    if (rc < 0)
        return rc;
    memcpy(dst, data, size);
    qt_map_drop(&q->shard.map, data, size);
    return QT_OK;
}

static int bad_channel(const struct qt_qcal *q, size_t i, size_t channel, struct qt_err *err,
                       const char *what)
{
    return qt_fail(err, QT_E_INPUT, q->shard.path, q->shard.slots[i].info.name, "channel %zu: %s",
                   channel, what);
}

static uint64_t tokens_of_channel(const struct qt_channels *c, size_t j)
{
    uint64_t total = 0;
    for (size_t b = 0; b < QT_HIST_BINS; b++)
        total += c->hist[j * QT_HIST_BINS + b];
    return total;
}

/* first: number of the first tensor of the linear input, over the tokens of which the statistics
 * are. */
static int check_channel(const struct qt_qcal *q, size_t first, const struct qt_channels *c,
                         uint64_t observed, size_t j, struct qt_err *err)
{
    const uint32_t *hist = c->hist + j * QT_HIST_BINS;
    const double tokens = (double)observed, slack = 1e-6;
    double sum2 = c->sum2[j], largest = (double)c->absmax[j] * (double)c->absmax[j];
    uint32_t top = 0;
    for (uint32_t b = 0; b < QT_HIST_BINS; b++)
        top = hist[b] ? b : top;
    if (!(c->absmax[j] >= 0 && isfinite(c->absmax[j])))
        return bad_channel(q, first + QT_QCAL_ABSMAX, j, err, "negative or not finite");
    if (!(sum2 >= 0 && isfinite(sum2)))
        return bad_channel(q, first + QT_QCAL_SUM2, j, err, "negative or not finite");
    if (tokens_of_channel(c, j) != observed)
        return bad_channel(q, first + QT_QCAL_HIST, j, err,
                           "the counts do not add up to the number of tokens");
    if (top != qt_hist_bin(c->absmax[j]))
        return bad_channel(q, first + QT_QCAL_HIST, j, err,
                           "the largest value is not in the bin of absmax");
    if (sum2 < largest * (1 - slack) || sum2 > tokens * largest * (1 + slack))
        return bad_channel(q, first + QT_QCAL_SUM2, j, err, "contradicts absmax");
    return QT_OK;
}

int qt_qcal_channels(struct qt_channels *out, const struct qt_qcal *q, size_t layer, size_t input,
                     struct qt_err *err)
{
    const struct qt_qcal_layer *l = &q->info.layer[layer];
    const size_t first = qt_qcal_index(&q->layers, layer, input, 0), k = l->k[input];
    uint64_t tokens = q->info.tokens;
    int rc = qt_channels_new(out, k, err);
    if (rc < 0)
        return rc;
    QT_TRY(read_tensor(out->sum2, q, first + QT_QCAL_SUM2, err));
    QT_TRY(read_tensor(out->hist, q, first + QT_QCAL_HIST, err));
    QT_TRY(read_tensor(out->absmax, q, first + QT_QCAL_ABSMAX, err));
    if (qt_qcal_expert(l, input) >= 0) /* of some tokens, the same for all channels */
        tokens = tokens_of_channel(out, 0);
    if (tokens > q->info.tokens) {
        rc = bad_channel(q, first + QT_QCAL_HIST, 0, err, "counts more tokens than the file has");
        goto done;
    }
    for (size_t j = 0; j < k; j++)
        QT_TRY(check_channel(q, first, out, tokens, j, err));
done:
    if (rc < 0)
        qt_channels_free(out);
    return rc;
}

int qt_qcal_hessian(double *h, const struct qt_qcal *q, size_t layer, size_t input,
                    const double *sum2, struct qt_err *err)
{
    /* H consists of FP32 products, summed in FP32 over some tokens and finally rounded to FP32. */
    const double relative = 1e-3, absolute = 1e-30;
    const size_t number = qt_qcal_index(&q->layers, layer, input, QT_QCAL_H);
    const size_t k = q->info.layer[layer].k[input];
    const unsigned char *data, *at;
    int rc = tensor_data(&data, q, number, err);
    if (rc < 0)
        return rc;
    at = data;
    for (size_t i = 0; i < k; i++) {
        for (size_t j = 0; j <= i; j++, at += sizeof(float)) {
            float v;
            memcpy(&v, at, sizeof v);
            if (!isfinite(v))
                return bad_channel(q, number, i, err, "not finite");
            h[i * k + j] = (double)v;
        }
        if (fabs(h[i * k + i] - sum2[i]) > relative * sum2[i] + absolute)
            return bad_channel(q, number, i, err, "the diagonal differs from the channel's sum2");
    }
    qt_map_drop(&q->shard.map, data, (size_t)(at - data));
    return QT_OK;
}

int qt_qcal_routed(uint32_t *routed, const struct qt_qcal *q, size_t layer, struct qt_err *err)
{
    const size_t number = qt_qcal_routed_index(&q->layers, layer);
    int rc = read_tensor(routed, q, number, err);
    for (size_t e = 0; rc == QT_OK && e < q->info.layer[layer].experts; e++)
        if (routed[e] > q->info.tokens)
            rc = qt_fail(err, QT_E_INPUT, q->shard.path, q->shard.slots[number].info.name,
                         "expert %zu: more tokens than the file has", e);
    return rc;
}
