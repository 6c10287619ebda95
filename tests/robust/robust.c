#include "tests/robust/robust.h"

#include "tests/unit/random.h"

#include <errno.h>
#include <limits.h>
#include <nettle/sha2.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

static void give_up(const char *what)
{
    fprintf(stderr, "harness: %s: %s\n", what, strerror(errno));
    exit(99);
}

/* ---- random numbers and bytes --------------------------------------------------------------- */

void random_start(uint64_t start)
{
    seed = start;
}

size_t below(size_t n)
{
    return n ? (size_t)(random_u64() % n) : 0;
}

struct bytes bytes_copy(const void *data, size_t size)
{
    struct bytes b = {malloc(size + 1), size};
    if (!b.data)
        give_up("memory");
    if (size)
        memcpy(b.data, data, size);
    b.data[size] = 0; /* text is also a string */
    return b;
}

struct bytes bytes_read(const char *path)
{
    FILE *f = fopen(path, "rb");
    long size = -1;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0)
        give_up(path);
    rewind(f);
    struct bytes b = {malloc((size_t)size + 1), (size_t)size};
    if (!b.data || fread(b.data, 1, b.size, f) != b.size)
        give_up(path);
    b.data[b.size] = 0;
    fclose(f);
    return b;
}

void bytes_write(const char *path, struct bytes b)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(b.data, 1, b.size, f) != b.size || fclose(f))
        give_up(path);
}

void bytes_free(struct bytes *b)
{
    free(b->data);
    *b = (struct bytes){0};
}

void bytes_splice(struct bytes *b, size_t at, size_t removed, const void *with, size_t size)
{
    at = at < b->size ? at : b->size;
    removed = removed < b->size - at ? removed : b->size - at;
    struct bytes new = {malloc(b->size - removed + size + 1), b->size - removed + size};
    if (!new.data)
        give_up("memory");
    memcpy(new.data, b->data, at);
    if (size)
        memcpy(new.data + at, with, size);
    memcpy(new.data + at + size, b->data + at + removed, b->size - at - removed);
    new.data[new.size] = 0;
    free(b->data);
    *b = new;
}

/* ---- running qtool -------------------------------------------------------------------------- */

static char program[PATH_MAX], directory[PATH_MAX];

void robust_begin(const char *path, char root[4096])
{
    const char *base = getenv("TMPDIR");
    if (!realpath(path, program) || !realpath(".", root))
        give_up(path);
    snprintf(directory, sizeof directory, "%s/qtool-robust-XXXXXX", base ? base : "/tmp");
    if (!mkdtemp(directory) || chdir(directory))
        give_up(directory);
}

void robust_end(bool keep)
{
    if (keep)
        printf("files of the last run: %s\n", directory);
    else if (chdir("/") == 0)
        shell("rm -rf '%s'", directory);
}

void shell(const char *format, ...)
{
    char command[8192];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    if (system(command) != 0)
        give_up(command);
}

/* Sanitizers need address space without limit. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

/* Becomes qtool. Memory is limited, so that an allocation by a size in a file fails. */
static void become(char *command)
{
    char *words[64];
    int count = 0;
    for (char *word = strtok(command, " "); word && count < 63; word = strtok(NULL, " "))
        words[count++] = word;
    words[count] = NULL;
#ifndef SANITIZED
    const struct rlimit memory = {(rlim_t)2 << 30, (rlim_t)2 << 30};
    setrlimit(RLIMIT_AS, &memory);
#endif
    const struct rlimit core = {0, 0};
    setrlimit(RLIMIT_CORE, &core);
    if (!freopen("out.txt", "w", stdout) || !freopen("err.txt", "w", stderr))
        _exit(99);
    alarm(SECONDS_PER_RUN); /* survives exec, and its signal ends the program */
    execv(program, words);
    _exit(99);
}

void qtool(struct run *run, const char *format, ...)
{
    char words[1024];
    va_list args;
    int status = 0;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    snprintf(run->command, sizeof run->command, "qtool %.900s --threads 1 --json", words);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        char command[1024];
        memcpy(command, run->command, sizeof command);
        become(command);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0)
        give_up("fork");
    run->status = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    if (run->status == 99)
        give_up(program);
}

static bool is_allowed(int status, const int *allowed)
{
    while (*allowed >= 0 && *allowed != status)
        allowed++;
    return *allowed == status;
}

const char *run_fault(const struct run *run, const int *allowed)
{
    struct bytes out = bytes_read("out.txt"), err = bytes_read("err.txt");
    json_t *document = json_loadb((const char *)out.data, out.size, 0, NULL);
    const json_t *ok = json_object_get(document, "ok");
    const json_t *code = json_object_get(json_object_get(document, "error"), "exit_code");
    const char *fault = NULL, *text = (const char *)err.data;
    if (run->status < 0)
        fault = run->status == -SIGALRM ? "it did not end" : "a signal ended it";
    else if (strstr(text, "runtime error:") || strstr(text, "Sanitizer:"))
        fault = "a sanitizer reported";
    else if (!is_allowed(run->status, allowed))
        fault = "its exit status is wrong";
    else if (!json_is_boolean(ok) || json_is_true(ok) != (run->status == 0) ||
             json_integer_value(code) != run->status)
        fault = "stdout is not one JSON document with its exit status";
    else if (run->status != 0 && !strstr(text, "qtool "))
        fault = "stderr has no message";
    json_decref(document);
    bytes_free(&out);
    bytes_free(&err);
    return fault;
}

/* ---- containers ----------------------------------------------------------------------------- */

void container_sign(const char *dir)
{
    char path[PATH_MAX], line[PATH_MAX];
    struct bytes signed_ = bytes_copy("", 0);
    snprintf(path, sizeof path, "%s/SHA256SUMS", dir);
    struct bytes old = bytes_read(path);
    for (char *entry = strtok((char *)old.data, "\n"); entry; entry = strtok(NULL, "\n")) {
        unsigned char digest[SHA256_DIGEST_SIZE];
        char file[PATH_MAX];
        struct sha256_ctx sha;
        snprintf(file, sizeof file, "%s/%s", dir, strlen(entry) > 66 ? entry + 66 : "");
        struct bytes b = bytes_read(file);
        sha256_init(&sha);
        sha256_update(&sha, b.size, b.data);
        sha256_digest(&sha, sizeof digest, digest);
        for (size_t i = 0; i < sizeof digest; i++)
            snprintf(line + 2 * i, 3, "%02x", digest[i]);
        int n = snprintf(line + 64, sizeof line - 64, "  %s\n", entry + 66);
        bytes_splice(&signed_, signed_.size, 0, line, 64 + (size_t)n);
        bytes_free(&b);
    }
    bytes_write(path, signed_);
    bytes_free(&signed_);
    bytes_free(&old);
}

/* The header of a safetensors file; *data = where the data begins. */
static json_t *header_of(size_t *data, struct bytes file)
{
    uint64_t n = 0;
    if (file.size < 8)
        return NULL;
    memcpy(&n, file.data, 8);
    *data = 8 + (size_t)n;
    return n > file.size - 8 ? NULL : json_loadb((const char *)file.data + 8, (size_t)n, 0, NULL);
}

struct place *container_places(size_t *count, const char *dir)
{
    char path[PATH_MAX];
    const char *name;
    json_t *entry;
    size_t data;
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    struct bytes file = bytes_read(path);
    json_t *header = header_of(&data, file);
    struct place *places = calloc(json_object_size(header) + 1, sizeof *places);
    if (!header || !places)
        give_up(path);
    *count = 0;
    json_object_foreach (header, name, entry) {
        const json_t *at = json_object_get(entry, "data_offsets");
        size_t first = (size_t)json_integer_value(json_array_get(at, 0));
        size_t end = (size_t)json_integer_value(json_array_get(at, 1));
        if (strcmp(name, "__metadata__") == 0)
            continue;
        struct place *p = &places[(*count)++];
        *p = (struct place){.at = data + first, .size = end - first};
        snprintf(p->name, sizeof p->name, "%s", name);
    }
    json_decref(header);
    bytes_free(&file);
    return places;
}

/* The member of the manifest that has the CRC of the stored tensor `name`. */
static json_t *record_of(json_t *manifest, const char *name)
{
    json_t *record = json_object_get(json_object_get(manifest, "copied"), name), *section;
    const char *mark = strstr(name, ".q.");
    char tensor[512];
    size_t i;
    if (!record)
        record = json_object_get(json_object_get(json_object_get(manifest, "kv"), "tensors"), name);
    if (record || !mark)
        return record;
    snprintf(tensor, sizeof tensor, "%.*s", (int)(mark - name), name);
    json_array_foreach (
        json_object_get(json_object_get(json_object_get(manifest, "tensors"), tensor), "sections"),
        i, section)
        if (strcmp(json_string_value(json_object_get(section, "name")), mark + 3) == 0)
            return section;
    return NULL;
}

void container_sign_tensors(const char *dir)
{
    char path[PATH_MAX], crc[9];
    size_t count;
    struct place *places = container_places(&count, dir);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    struct bytes file = bytes_read(path);
    snprintf(path, sizeof path, "%s/qtool.json", dir);
    json_t *manifest = json_load_file(path, 0, NULL);
    for (size_t i = 0; i < count; i++) {
        json_t *record = record_of(manifest, places[i].name);
        if (!record)
            give_up(places[i].name);
        snprintf(crc, sizeof crc, "%08x",
                 (unsigned)crc32(0, file.data + places[i].at, (unsigned)places[i].size));
        json_object_set_new(record, "crc32", json_string(crc));
    }
    if (!manifest || json_dump_file(manifest, path, JSON_INDENT(2)))
        give_up(path);
    json_decref(manifest);
    bytes_free(&file);
    free(places);
}
