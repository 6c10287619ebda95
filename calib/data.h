/*
 * Internals of reading data files.
 *
 *   stream.c   a file, decompressed if it is a gzip file, as a stream of bytes
 *   records.c  JSON Lines and JSON arrays -> texts and conversations
 *   chat.c     conversations -> messages for the chat template
 *   data.c     files of all kinds -> ids -> windows
 */
#ifndef QT_CALIB_DATA_H
#define QT_CALIB_DATA_H

#include "calib/calib.h"
#include <zlib.h>

/* ---- bytes (stream.c) ----------------------------------------------------------------------- */

struct qt_stream {
    const char *path; /* borrowed, for errors */
    struct qt_map map;
    int pipe;    /* descriptor of what cannot be mapped, or -1; `input` has what was read of it */
    char *input; /* [input_size], consumed up to input_at */
    size_t input_size, input_at;
    bool gzip;
    bool ended; /* all bytes of the file have been buffered */
    bool (*interrupted)(void);
    /* Bytes that have been read but not consumed: data[size], inside of buffer[capacity]. */
    char *data, *buffer;
    size_t size, capacity;
    size_t at;    /* bytes of the map that were taken */
    size_t lines; /* lines consumed */
    bool inflating;
    z_stream z;
};

/* Most bytes that can be buffered: of a text, a record, or a compressed file of token ids. */
#define QT_STREAM_MAX ((size_t)1 << 32)

/* Opens a file, "-" (standard input) or a pipe, and recognizes a gzip file. QT_E_INPUT if it only
 * has the name of one. On failure *s may be closed, but need not be. */
int qt_stream_open(struct qt_stream *s, const char *path, bool (*interrupted)(void),
                   struct qt_err *err);
void qt_stream_close(struct qt_stream *s);
/* Reads until `need` bytes are buffered, or all. QT_E_INPUT: the gzip data is damaged, or more than
 * QT_STREAM_MAX bytes are needed. QT_E_INTERRUPTED. */
int qt_stream_fill(struct qt_stream *s, size_t need, struct qt_err *err);
/* Drops the first n buffered bytes. */
void qt_stream_consume(struct qt_stream *s, size_t n);

/* ---- records (records.c) -------------------------------------------------------------------- */

/* True if the text begins as JSON does: with an object that has a quoted key, or with an array of
 * objects, strings or numbers. `size` may end anywhere. */
bool qt_text_is_json(const char *text, size_t size);

/* Called for each record with its text or its conversation; *stop = true ends the reading. `line`:
 * of its beginning. */
struct qt_record_sink {
    void *ctx;
    int (*text)(void *ctx, bool *stop, const char *text, size_t size, size_t line,
                struct qt_err *err);
    int (*chat)(void *ctx, bool *stop, const json_t *record, size_t line, struct qt_err *err);
};
/* Reads records from the stream: an array of them, or one after another, each on its own line or
 * lines. QT_E_INPUT names the line. */
int qt_records_read(struct qt_stream *s, const struct qt_record_sink *sink, struct qt_err *err);

/* ---- conversations (chat.c) ----------------------------------------------------------------- */

/* The member of a record that holds the messages, and its name; NULL: no conversation. */
const json_t *qt_chat_list(const json_t *record, const char **key);
/* *messages: an array of objects with "role" and "content", from records of OpenAI's form (which is
 * this one) or ShareGPT's ("from", "value"). *tools: the record's "tools", or NULL. The caller
 * releases both. QT_E_INPUT names the line. */
int qt_chat_read(json_t **messages, json_t **tools, const json_t *record, size_t line,
                 const char *file, struct qt_err *err);

#endif
