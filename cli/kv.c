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

const char *kv_keys_name(enum qt_kv_keys keys)
{
    return qt_kv_keys_names[keys - QT_KV_KEYS_CHANNEL];
}

void kv_row(struct table *t, enum qt_kv_keys keys, size_t head_dim)
{
    static const char *const of[] = {"per channel and 64 tokens", "static", "per token"};
    char with_scales[TEXT_SIZE] = "";
    if (head_dim)
        snprintf(with_scales, sizeof with_scales, "; %.4g bits with scales",
                 qt_kv_bits(keys, head_dim));
    table_row(t, "kv cache\t4 bits: key scales %s, value scales per token%s",
              of[keys - QT_KV_KEYS_CHANNEL], with_scales);
}
