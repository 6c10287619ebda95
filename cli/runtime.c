/* --runtime. */
#include "cli/cli.h"

const char *const runtime_names[] = {"fused", "reference", NULL};

int runtime_check(int runtime, const char *device, struct qt_err *err)
{
    if (runtime == RUNTIME_FUSED && device_number(device) < 0)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "--runtime fused needs --device cuda[:N]");
    return QT_OK;
}

bool runtime_is_fused(int runtime, const char *device)
{
    return device_number(device) >= 0 && runtime != RUNTIME_REFERENCE;
}

int runtime_check_kv(int runtime, const char *device, enum qt_kv_keys keys, struct qt_err *err)
{
    if (!runtime_is_fused(runtime, device) || keys == QT_KV_KEYS_CHANNEL)
        return QT_OK;
    return qt_fail(err, QT_E_UNSUPPORTED, NULL, NULL,
                   "no kernel for a cache with --kv-keys %s: use --runtime reference",
                   kv_keys_name(keys));
}
