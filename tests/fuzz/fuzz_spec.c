/* Scheme texts of users and manifests. The canonical text parses to the same scheme. */
#include "pack/pack.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

void fuzz_init(void)
{
    const struct qt_preset *preset;
    const struct qt_scheme *s;
    for (size_t i = 0; (s = qt_scheme_at(i)) != NULL; i++)
        for (size_t p = 0; (preset = qt_scheme_preset(s, p)) != NULL; p++)
            fuzz_seed(preset->name, preset->name, strlen(preset->name));
}

void fuzz_one(const uint8_t *data, size_t size)
{
    char text[256];
    struct qt_spec a, b;
    struct qt_err err = {0};
    if (size >= sizeof text)
        return;
    memcpy(text, data, size);
    text[size] = '\0';
    int rc = qt_spec_parse(&a, text, &err);
    FUZZ_CHECK(rc == QT_OK || (rc == QT_E_USAGE && err.reason[0] && !fuzz_must_accept));
    if (rc < 0)
        return;
    fuzz_ok(qt_spec_parse(&b, a.text, &err), &err);
    FUZZ_CHECK(a.scheme == b.scheme && a.preset == b.preset && strcmp(a.text, b.text) == 0);
    FUZZ_CHECK(memcmp(a.value, b.value, sizeof a.value) == 0);
}
