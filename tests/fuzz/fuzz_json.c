/* JSON as Python writes it. What strict JSON accepts means the same, and what only the lenient
 * parse accepts has a literal or a lone surrogate. */
#include "formats/formats.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

void fuzz_init(void)
{
}

void fuzz_one(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    json_t *strict, *lenient, *record;
    struct qt_err err = {0};
    const bool is_strict = fuzz_accepted(qt_json_parse(&strict, text, size, "x", &err), &err);
    const bool is_lenient =
        fuzz_accepted(qt_json_parse_lenient(&lenient, text, size, "x", &err), &err);
    FUZZ_CHECK(is_lenient || !is_strict);
    FUZZ_CHECK(!is_strict || json_equal(strict, lenient));
    FUZZ_CHECK(is_strict || !is_lenient || memmem(text, size, "NaN", 3) ||
               memmem(text, size, "Infinity", 8) || memmem(text, size, "\\u", 2));
    if (fuzz_accepted(qt_json_parse_data(&record, text, size, 7, "\\ufffe", "x", &err), &err))
        json_decref(record);
    else
        FUZZ_CHECK(!is_strict);
    json_decref(strict);
    json_decref(lenient);
}
