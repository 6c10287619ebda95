/* Messages about paths at which there is no checkpoint. */
#include "formats/formats_internal.h"
#include "formats/gguf.h"

#include <stdio.h>
#include <string.h>

/* True if the path is like the name of a model on the Hugging Face Hub: ORG/NAME, and ORG is no
 * directory here. */
static bool is_hub_name(const char *path)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    const char *name = qt_base_name(path);
    const size_t org = strspn(path, letters), rest = strspn(name, letters);
    char parent[128];
    if (name == path || path[0] == '.' || !rest || name[rest] || path + org + 1 != name ||
        org >= sizeof parent || qt_shard_name_ok(name) || qt_gguf_name_ok(name))
        return false;
    snprintf(parent, sizeof parent, "%.*s", (int)org, path);
    return !qt_path_exists(parent);
}

int qt_ckpt_none_at(const char *path, int why, struct qt_err *err)
{
    return is_hub_name(path)
               ? qt_fail(err, QT_E_INPUT, path, NULL,
                         "cannot open: %s; qtool downloads no models: use 'hf download %s "
                         "--local-dir DIR'",
                         strerror(why), path)
               : qt_fail(err, QT_E_INPUT, path, NULL, "cannot open: %s", strerror(why));
}

/* True for the directory of a model in the cache of Hugging Face. */
static bool has_snapshots(const char *dir)
{
    struct qt_err ignored;
    char *path;
    if (qt_path_join(&path, dir, "snapshots", &ignored) < 0)
        return false;
    const bool found = qt_path_is_dir(path);
    qt_free(path);
    return found;
}

int qt_ckpt_none_in(const char *dir, struct qt_err *err)
{
    return qt_fail(err, QT_E_INPUT, dir, NULL, "no checkpoint here%s",
                   has_snapshots(dir)
                       ? ", but a cache of Hugging Face: give a directory in snapshots/"
                       : ": no *.safetensors, " QT_INDEX_NAME
                         ", pytorch_model.bin, pytorch_model.bin.index.json or *.gguf");
}
