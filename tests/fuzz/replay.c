/*
 * Runs inputs through a fuzz target without libFuzzer: replay_NAME FILE_OR_DIRECTORY... A failed
 * check ends the process. The last line of output has the number of inputs.
 */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int run_file(const char *path)
{
    struct qt_err err = {0};
    char *text;
    size_t size;
    if (qt_file_read(&text, &size, path, (size_t)1 << 30, &err) < 0) {
        fprintf(stderr, "%s: %s\n", path, err.reason);
        return 1;
    }
    /* An allocation of exactly this size, so that sanitizers detect reads beyond it. The name of
     * the input is then the last line on stderr. */
    unsigned char *exact = malloc(size ? size : 1);
    if (!exact)
        return 1;
    memcpy(exact, text, size);
    qt_free(text);
    fprintf(stderr, "%s\n", path);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    return 0;
}

static int run_all(const char *path)
{
    struct dirent **items;
    int failed = 0, n = scandir(path, &items, NULL, alphasort);
    if (n < 0)
        return run_file(path);
    for (int i = 0; i < n; i++) {
        char name[1024];
        snprintf(name, sizeof name, "%s/%s", path, items[i]->d_name);
        if (items[i]->d_name[0] != '.')
            failed |= run_all(name);
        free(items[i]);
    }
    free(items);
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0;
    LLVMFuzzerInitialize(&argc, &argv);
    LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
    for (int i = 1; i < argc; i++)
        failed |= run_all(argv[i]);
    printf("%zu passed, %d failed, 0 skipped\n", fuzz_inputs, failed);
    return failed;
}
