/* The table of export formats. */
#include "pack/export/export.h"

#include <string.h>

static const struct qt_export_format *const formats[] = {
    &qt_export_dense,   &qt_export_compressed_tensors,
    &qt_export_humming, &qt_export_gptq,
    &qt_export_awq,     &qt_export_bnb,
    &qt_export_mlx,     &qt_export_gguf,
};

const struct qt_export_format *qt_export_format_at(size_t i)
{
    return i < sizeof formats / sizeof *formats ? formats[i] : NULL;
}

const struct qt_export_format *qt_export_format_find(const char *name)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i]->name, name) == 0)
            return formats[i];
    return NULL;
}

const char *qt_export_name(const struct qt_export_format *f)
{
    return f->name;
}

const char *qt_export_help(const struct qt_export_format *f)
{
    return f->help;
}

const char *qt_export_runtimes(const struct qt_export_format *f)
{
    return f->runtimes;
}

enum qt_export_fit qt_export_fit(const char **why, const struct qt_export_format *f,
                                 const struct qt_spec *spec)
{
    *why = NULL;
    return f->fit ? f->fit(why, spec) : QT_EXPORT_EXACT;
}

bool qt_export_has_family(const struct qt_export_format *f, const char *family)
{
    return !f->has_family || f->has_family(family);
}
