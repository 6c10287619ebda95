/* --kv and --kv-keys. */
#include "cli/cli.h"

#include <math.h>
#include <stdio.h>

int kv_options_keys(enum qt_kv_keys *out, const struct kv_options *o, struct qt_err *err)
{
    const bool chosen = o->keys != KV_KEYS_DEFAULT;
    *out = QT_KV_KEYS_NONE;
    if (!o->bits && chosen)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--kv-keys needs --kv 4");
    if (o->bits)
        *out = chosen ? (enum qt_kv_keys)(QT_KV_KEYS_CHANNEL + o->keys) : QT_KV_KEYS_CHANNEL;
    return QT_OK;
}

int kv_open(struct qt_kv *out, const struct kv_options *o, const struct source *s,
            struct qt_err *err)
{
    enum qt_kv_keys stored = QT_KV_KEYS_NONE, keys;
    struct qt_model *model;
    int rc = kv_options_keys(&keys, o, err);
    if (rc == QT_OK && s->container && qt_kv_entry(s->container))
        rc = qt_kv_check(&stored, s->container, err);
    if (rc < 0)
        return rc;
    if (o->keys == KV_KEYS_DEFAULT && stored)
        keys = stored;
    *out = (struct qt_kv){.keys = keys, .container = s->container};
    if (keys == QT_KV_KEYS_STATIC && stored != QT_KV_KEYS_STATIC)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--kv-keys static needs a container with static key scales: make it with "
                       "'qtool quantize --kv 4 --kv-keys static --data FILE'");
    rc = qt_model_open(&model, &s->weights, err);
    if (rc < 0)
        return rc;
    const char *part = qt_model_cannot(model, QT_USE_KV4);
    if (part)
        rc = qt_fail(err, QT_E_UNSUPPORTED, s->weights.dir, NULL, "--kv does not support %s", part);
    else if (keys == QT_KV_KEYS_STATIC)
        rc = qt_kv_open(out, s->container, qt_model_info(model), err);
    qt_model_close(model);
    return rc;
}

const char *kv_keys_name(enum qt_kv_keys keys)
{
    return qt_kv_keys_names[keys - QT_KV_KEYS_CHANNEL];
}

void kv_row(struct table *t, enum qt_kv_keys keys, size_t head_dim, size_t tokens)
{
    static const char *const of[] = {"per channel and 64 tokens", "static", "per token"};
    char with_scales[TEXT_SIZE] = "", with_keys[2 * TEXT_SIZE] = "";
    if (head_dim)
        snprintf(with_scales, sizeof with_scales, "; %.4g bits with scales",
                 qt_kv_bits(keys, head_dim));
    if (head_dim && tokens && qt_kv_tail_bytes(keys, 1, 1, head_dim))
        snprintf(with_keys, sizeof with_keys, ", %.4g with the FP16 keys of %zu tokens",
                 qt_kv_sequence_bits(keys, head_dim, tokens), tokens);
    table_row(t, "kv cache\t4 bits: key scales %s, value scales per token and 16 channels%s%s",
              of[keys - QT_KV_KEYS_CHANNEL], with_scales, with_keys);
}
