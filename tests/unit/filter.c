/* CASE='PATTERN' runs the cases of a unit test program whose name matches (* and ?). Linked into
 * every unit test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

__attribute__((constructor)) static void filter_cases(void)
{
    const char *pattern = getenv("CASE");
    if (pattern)
        cmocka_set_test_filter(pattern);
}
