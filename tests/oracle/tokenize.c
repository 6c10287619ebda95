/*
 * tokenize DIR FILE [special]: ids by DIR/tokenizer.json, one a line, on stdout. FILE may hold
 * several texts with the byte 0x1e between them; an empty line ends the ids of each.
 *
 * tokenize DIR FILE decode: the way back, from such lines of ids to texts with 0x1e behind each.
 * Driven by tokenizer.py.
 */
#include "calib/calib.h"

#include <stdio.h>
#include <stdlib.h>
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

/* Prints the texts of the lists of ids in file[size]. */
static int print_texts(const struct qt_tokenizer *tok, const char *dir, const char *file,
                       size_t size, struct qt_err *err)
{
    struct qt_detokenizer *d = NULL;
    uint32_t *ids = NULL;
    size_t count = 0;
    int rc;
    QT_TRY(qt_detokenizer_open(&d, tok, dir, err));
    QT_TRY(qt_array_new(&ids, size + 1, sizeof *ids, err));
    for (const char *line = file; line < file + size; line = strchr(line, '\n') + 1) {
        if (*line != '\n') {
            ids[count++] = (uint32_t)strtoul(line, NULL, 10);
            continue;
        }
        char *text;
        size_t bytes;
        QT_TRY(qt_detokenize(&text, &bytes, d, ids, count, err));
        fwrite(text, 1, bytes, stdout);
        putchar(0x1e);
        qt_free(text);
        count = 0;
    }
done:
    qt_free(ids);
    qt_detokenizer_close(d);
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
        fprintf(stderr, "usage: tokenize DIR FILE [special|decode]\n");
        return 2;
    }
    bool special = argc > 3 && strcmp(argv[3], "special") == 0;
    bool decode = argc > 3 && strcmp(argv[3], "decode") == 0;
    QT_TRY(qt_tokenizer_open(&tok, argv[1], &err));
    QT_TRY(qt_file_read(&file, &size, argv[2], SIZE_MAX / 2, &err));
    if (decode)
        QT_TRY(print_texts(tok, argv[1], file, size, &err));
    for (char *text = decode ? NULL : file, *end; text; text = end ? end + 1 : NULL) {
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
