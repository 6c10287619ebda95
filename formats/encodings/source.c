/* Reads from config.json, and from the files of quantizers, how the weights of a checkpoint are
 * quantized. */
#include "formats/encodings/encoding.h"

enum { MAX_CONFIG = 16 << 20, FP8_BLOCK = 128 };

/* The methods whose tensors the encodings can read. */
static const char *const methods[] = {"fp8",   "fbgemm_fp8", "compressed-tensors",
                                      "mxfp4", "modelopt",   "modelopt_fp4",
                                      "gptq",  "awq",        "bitsandbytes"};

static int load(json_t **out, const char *dir, const char *name, struct qt_err *err)
{
    struct qt_err ignored = {0};
    char *path;
    *out = NULL;
    int rc = qt_path_join(&path, dir, name, err);
    if (rc < 0)
        return rc;
    if (qt_path_exists(path))
        rc = qt_json_load_lenient(out, path, MAX_CONFIG, &ignored);
    if (rc == QT_E_RESOURCE)
        qt_fail(err, rc, ignored.file, NULL, "%s", ignored.reason);
    else
        rc = QT_OK;
    qt_free(path);
    return rc;
}

const char *const qt_quantization_paths[] = {QT_QUANTIZATION_KEY,
                                             "compression_config",
                                             "text_config/" QT_QUANTIZATION_KEY,
                                             "text_config/compression_config",
                                             "llm_config/" QT_QUANTIZATION_KEY,
                                             "language_config/" QT_QUANTIZATION_KEY,
                                             "thinker_config/" QT_QUANTIZATION_KEY,
                                             "thinker_config/text_config/" QT_QUANTIZATION_KEY,
                                             NULL};

/* The object at a path of config.json, or NULL. */
static const json_t *find_object(const json_t *obj, const char *path)
{
    while (*path) {
        const size_t size = strcspn(path, "/");
        obj = json_object_getn(obj, path, size);
        path += size + (path[size] == '/');
    }
    return json_is_object(obj) ? obj : NULL;
}

static const json_t *find_section(const json_t *config)
{
    const json_t *found = NULL;
    for (size_t i = 0; qt_quantization_paths[i] && !found; i++)
        found = find_object(config, qt_quantization_paths[i]);
    return found;
}

static enum qt_dtype find_dtype(const json_t *config)
{
    static const char *const keys[] = {"dtype", "torch_dtype"};
    static const struct {
        const char *name;
        enum qt_dtype dtype;
    } dtypes[] = {{"float16", QT_F16}, {"bfloat16", QT_BF16}, {"float32", QT_F32}};
    const json_t *places[] = {config, json_object_get(config, "text_config")};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            const char *text = json_string_value(json_object_get(places[p], keys[k]));
            for (size_t d = 0; text && d < sizeof dtypes / sizeof *dtypes; d++)
                if (strcmp(text, dtypes[d].name) == 0)
                    return dtypes[d].dtype;
        }
    return QT_BF16;
}

/* weight_block_size of FP8, or block_structure of the first group of compressed-tensors. */
static const json_t *find_block(const json_t *section)
{
    const char *key;
    const json_t *block = json_object_get(section, "weight_block_size");
    json_t *value;
    json_object_foreach (json_object_get(section, "config_groups"), key, value)
        if (!json_is_array(block))
            block = json_object_get(json_object_get(value, "weights"), "block_structure");
    return block;
}

/* The object of the configuration of the decoder in a multimodal one. */
static const json_t *decoder_of(const json_t *config)
{
    const json_t *text = json_object_get(config, "text_config");
    return json_is_string(json_object_get(text, "model_type")) ? text : config;
}

int qt_source_read(struct qt_source *out, const char *dir, struct qt_err *err)
{
    static const char *const files[] = {"hf_quant_config.json", "quantize_config.json",
                                        "quant_config.json"};
    *out = (struct qt_source){.block = {FP8_BLOCK, FP8_BLOCK}};
    int rc = load(&out->config, dir, "config.json", err);
    out->section = find_section(out->config);
    for (size_t i = 0; i < sizeof files / sizeof *files && rc == QT_OK && !out->section; i++) {
        json_decref(out->file);
        rc = load(&out->file, dir, files[i], err);
        const json_t *section = json_object_get(out->file, "quantization");
        out->section = json_is_object(section) ? section : out->file;
    }
    if (rc < 0) {
        qt_source_free(out);
        return rc;
    }
    out->method = qt_source_string(out, "quant_method");
    out->model_type = json_string_value(json_object_get(decoder_of(out->config), "model_type"));
    out->dtype = find_dtype(out->config);
    const json_t *block = find_block(out->section);
    for (size_t i = 0; i < 2; i++) {
        const json_int_t n = json_integer_value(json_array_get(block, i));
        if (json_array_size(block) == 2 && n > 0)
            out->block[i] = (size_t)n;
    }
    return QT_OK;
}

void qt_source_free(struct qt_source *s)
{
    json_decref(s->config);
    json_decref(s->file);
    *s = (struct qt_source){0};
}

const char *qt_source_string(const struct qt_source *s, const char *key)
{
    return json_string_value(json_object_get(s->section, key));
}

int qt_source_check(const struct qt_source *s, const char *dir, struct qt_err *err)
{
    const json_t *transform = json_object_get(s->section, "transform_config");
    const char *sparsity = json_string_value(
        json_object_get(json_object_get(s->section, "sparsity_config"), "format"));
    bool known = !s->method;
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
        known = known || strcmp(s->method, methods[i]) == 0;
    if (!known)
        return qt_fail(
            err, QT_E_UNSUPPORTED, dir, NULL,
            "the checkpoint is already quantized with quant_method '%.100s', which is "
            "not supported: give the FP16, BF16 or FP32 checkpoint that it was made from",
            s->method);
    if (json_object_size(json_object_get(transform, "config_groups")))
        return qt_fail(err, QT_E_UNSUPPORTED, dir, NULL,
                       "the activations of the quantized model are transformed ('transform_config' "
                       "in config.json), which is not supported");
    if (sparsity && strcmp(sparsity, "dense") != 0)
        return qt_fail(err, QT_E_UNSUPPORTED, dir, NULL,
                       "sparse weights ('sparsity_config' in config.json) are not supported");
    return QT_OK;
}
