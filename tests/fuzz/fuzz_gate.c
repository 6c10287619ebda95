/* Gate expressions: QT_OK, or QT_E_USAGE or QT_E_GATE with a reason. */
#include "tests/fuzz/fuzz.h"
#include "verify/verify.h"

#include <string.h>

void fuzz_init(void)
{
}

void fuzz_one(const uint8_t *data, size_t size)
{
    static const struct qt_figure figures[] = {{"ppl", 9.5}, {"bpw", 4.25}, {"same_top", NAN}};
    static const struct qt_figure each[] = {{"sqnr", 12}, {"sqnr", NAN}};
    static const char *const names[] = {"a.weight", "b.weight"};
    const struct qt_tensor_figures tensors = {names, 2, each, 1};
    char text[512];
    struct qt_err err = {0};
    if (size >= sizeof text)
        return;
    memcpy(text, data, size);
    text[size] = '\0';
    int rc = qt_gate_check(text, figures, 3, &tensors, &err);
    FUZZ_CHECK(rc == QT_OK || rc == QT_E_USAGE || rc == QT_E_GATE);
    FUZZ_CHECK(rc == QT_OK || err.reason[0]);
    /* A NaN figure meets no condition. (Within brackets, same_top is a tensor name.) */
    FUZZ_CHECK(rc != QT_OK || !strstr(text, "same_top") || strchr(text, '['));
}
