/*
 * tokenize DIR FILE [special]: ids by DIR/tokenizer.json, one a line, on stdout. FILE may hold
 * several texts with the byte 0x1e between them; an empty line ends the ids of each. Driven by
 * tokenizer.py.
 */
#include "calib/calib.h"

#include <stdio.h>
#include <string.h>

static int print_ids(const struct qt_tokenizer *tok, const char *text, size_t size, bool special,
                     struct qt_err *err)
{
    uint32_t *ids;
    size_t count;
    int rc = qt_tokenizer_encode(&ids, &count, tok, text, size, special, err);
    for (size_t i = 0; i < count; i++)
        printf("%u\n", ids[i]);
    printf("\n");
    qt_free(ids);
    return rc;
}

int main(int argc, char **argv)
{
    struct qt_err err = {0};
    struct qt_tokenizer *tok = NULL;
    char *file = NULL;
    size_t size;
    int rc;
    if (argc < 3) {
        fprintf(stderr, "usage: tokenize DIR FILE [special]\n");
        return 2;
    }
    bool special = argc > 3 && strcmp(argv[3], "special") == 0;
    QT_TRY(qt_tokenizer_open(&tok, argv[1], &err));
    QT_TRY(qt_file_read(&file, &size, argv[2], SIZE_MAX / 2, &err));
    for (char *text = file, *end; text; text = end ? end + 1 : NULL) {
        size_t left = size - (size_t)(text - file);
        end = memchr(text, 0x1e, left);
        QT_TRY(print_ids(tok, text, end ? (size_t)(end - text) : left, special, &err));
    }
done:
    if (rc < 0) {
        char message[2048];
        qt_err_format(message, sizeof message, &err);
        fprintf(stderr, "tokenize: %s\n", message);
    }
    qt_free(file);
    qt_tokenizer_close(tok);
    return qt_exit_code(rc);
}
