/*
 * Runs qtool on files with a random change of their structure, for every format that qtool reads.
 * Whatever the change, qtool must end by itself with a documented exit status and a message, and
 * leave either a container that `verify` accepts or none. Some files are written in another form
 * that means the same: figures and containers must not change. Usage: mutants QTOOL [CASES]
 *
 * Case n depends on the seed plus n alone: QT_SEED=(the number that a failure prints) mutants QTOOL
 * 1 repeats it and keeps its files.
 */
#include "tests/robust/robust.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const int reading[] = {0, 2, 3, 4, -1};
/* Also: what was written before the interruption is damaged (6), or is of another run (8). */
static const int resuming[] = {0, 2, 3, 4, 6, 8, -1};

struct target {
    const char *dir, *file; /* the file that changes, in a directory that is made anew every time */
    void (*mutate)(struct bytes *);
    void (*restyle)(struct bytes *); /* or NULL */
    void (*sign)(const char *dir);   /* afterwards, or NULL */
    const int *allowed;
    const char *commands[6];
};

static void gzip_text(struct bytes *b)
{
    mutate_gzip(b, mutate_text);
}
static void gzip_lines(struct bytes *b)
{
    mutate_gzip(b, mutate_lines);
}
static void gzip_npy(struct bytes *b)
{
    mutate_gzip(b, mutate_npy);
}
static void sign_tensors(const char *dir)
{
    container_sign_tensors(dir);
    container_sign(dir);
}
static void mutate_data(struct bytes *b)
{
    uint64_t header;
    memcpy(&header, b->data, 8);
    b->data[8 + header + below(b->size - 8 - header)] =
        (unsigned char)(below(2) ? 0xff : below(256));
}

/* The commands of a target; one is chosen. */
#define EVAL(model, data) "eval " model " --data " data " --seqlen 16"
#define WEIGHTS                                                                                    \
    {                                                                                              \
        "inspect llama", "plan llama --scheme mix24", "quantize llama -o out --scheme nf4",        \
            "quantize llama -o out --scheme w4ax", "quantize llama -o out --scheme fp6",           \
            EVAL("llama", "llama/ids.u16")                                                         \
    }
#define CONFIG                                                                                     \
    {                                                                                              \
        "plan llama --scheme nf4", EVAL("llama", "llama/ids.u16"),                                 \
            "quantize llama -o out --scheme nf3 --kv 4 --data llama/ids.u16 --samples 1 "          \
            "--seqlen 16"                                                                          \
    }
#define SHARDS                                                                                     \
    {                                                                                              \
        "inspect shards", "quantize shards -o out --scheme none"                                   \
    }
#define TOKENIZER                                                                                  \
    {                                                                                              \
        EVAL("nano", "data/a.txt")                                                                 \
    }
#define TORCH                                                                                      \
    {                                                                                              \
        "inspect torch/FILE", "quantize torch/FILE -o out --scheme none",                          \
            "quantize torch/FILE -o out --scheme int8"                                             \
    }
#define DATA(file)                                                                                 \
    {                                                                                              \
        EVAL("nano", "data/" file),                                                                \
            "calibrate nano -o out --data data/" file " --samples 1 --seqlen 16"                   \
    }
#define STATISTICS                                                                                 \
    {                                                                                              \
        "inspect stats/a.qcal", "quantize llama -o out --scheme nf4 --calib stats/a.qcal",         \
            "calibrate --merge stats/a.qcal stats/b.qcal -o out"                                   \
    }
#define CONTAINER                                                                                  \
    {                                                                                              \
        "verify box", "verify box --source llama", "inspect box", EVAL("box", "llama/ids.u16")     \
    }
#define RESUME                                                                                     \
    {                                                                                              \
        "quantize --resume nano -o out --scheme lut3"                                              \
    }

static const char weights[] = "model.safetensors";
static const struct target targets[] = {
    {"llama", weights, mutate_safetensors, restyle_safetensors, NULL, reading, WEIGHTS},
    {"llama", "config.json", mutate_json, restyle_json, NULL, reading, CONFIG},
    {"shards", "pytorch_model.bin.index.json", mutate_json, restyle_json, NULL, reading, SHARDS},
    {"nano", "tokenizer.json", mutate_json, restyle_json, NULL, reading, TOKENIZER},
    {"nano", "tokenizer_config.json", mutate_json, restyle_json, NULL, reading, TOKENIZER},
    {"torch", NULL, mutate_torch, restyle_torch, NULL, reading, TORCH},
    {"data", "a.txt", mutate_text, NULL, NULL, reading, DATA("a.txt")},
    {"data", "a.txt", gzip_text, restyle_gzip, NULL, reading, DATA("a.txt.gz")},
    {"data", "a.json", mutate_json, NULL, NULL, reading, DATA("a.json")},
    {"data", "a.jsonl", mutate_lines, restyle_lines, NULL, reading, DATA("a.jsonl")},
    {"data", "a.jsonl", gzip_lines, restyle_gzip, NULL, reading, DATA("a.jsonl.gz")},
    {"data", "a.npy", mutate_npy, restyle_npy, NULL, reading, DATA("a.npy")},
    {"data", "a.npy", gzip_npy, restyle_gzip, NULL, reading, DATA("a.npy.gz")},
    {"data", "a.u16", mutate_raw, NULL, NULL, reading, DATA("a.u16")},
    {"stats", "a.qcal", mutate_qcal, restyle_safetensors, NULL, reading, STATISTICS},
    {"box", "qtool.json", mutate_json, restyle_json, container_sign, reading, CONTAINER},
    {"box", weights, mutate_safetensors, restyle_safetensors, container_sign, reading, CONTAINER},
    {"box", weights, mutate_data, NULL, sign_tensors, reading, CONTAINER},
    {"box", "SHA256SUMS", mutate_text, NULL, NULL, reading, CONTAINER},
    {"out.partial", "journal", mutate_journal, NULL, NULL, resuming, RESUME},
    {"out.partial", weights, mutate_raw, NULL, NULL, resuming, RESUME},
};
enum { TARGETS = sizeof targets / sizeof *targets };

/* ---- clean files ---------------------------------------------------------------------------- */

static void write_text(const char *path, const char *text)
{
    bytes_write(path, (struct bytes){(unsigned char *)(uintptr_t)text, strlen(text)});
}

/* Kills a run when its journal has most of the units. */
static void interrupt_run(const char *program)
{
    for (int attempt = 0; attempt < 20; attempt++) {
        shell("rm -rf out out.partial; %s quantize nano -o out --scheme lut3 --threads 1 -q >log "
              "2>&1 & "
              "pid=$!; n=; while kill -0 $pid 2>/dev/null && [ \"${n:-0}\" -lt 24 ]; do "
              "n=$(grep -c unit out.partial/journal 2>/dev/null); done; "
              "kill -KILL $pid 2>/dev/null; wait $pid 2>/dev/null; true",
              program);
        if (access("out.partial/journal", F_OK) == 0)
            return;
    }
    fprintf(stderr, "harness: no run could be interrupted\n");
    exit(99);
}

static void make_clean(const char *root, const char *program)
{
    static const int fine[] = {0, -1};
    static const char npy[] =
        "\x93NUMPY\1\0\x76\0{'descr': '<u2', 'fortran_order': False, 'shape': (16,), }";
    struct bytes array = bytes_copy(npy, sizeof npy - 1);
    struct run run;
    while (array.size < 127)
        bytes_splice(&array, array.size, 0, " ", 1);
    bytes_splice(&array, array.size, 0, "\n", 1);
    for (unsigned char i = 0; i < 16; i++)
        bytes_splice(&array, array.size, 0, (unsigned char[]){(unsigned char)(3 * i), 0}, 2);
    shell("mkdir clean clean/data clean/stats; cp -r '%s/tests/golden/models/llama' clean/llama; "
          "cp -r '%s/tests/golden/torch' clean/torch; mv clean/torch/sharded clean/shards; "
          "mkdir clean/nano; cp '%s'/examples/nano-llama/*.json clean/nano; "
          "ln -s '%s/examples/nano-llama/model.safetensors' clean/nano; "
          "head -c 700 '%s/examples/nano-llama/eval.txt' >clean/data/a.txt; "
          "head -c 64 clean/llama/ids.u16 >clean/data/a.u16; chmod -R u+w clean; cp -a clean/. .",
          root, root, root, root, root);
    bytes_write("clean/data/a.npy", array);
    bytes_free(&array);
    write_text("clean/data/a.json", "[{\"text\": \"The quick brown fox jumps over the dog.\"}, "
                                    "{\"text\": \"It was not amused, but polite.\", \"id\": 7}]\n");
    write_text("clean/data/a.jsonl", "{\"text\": \"The quick brown fox jumps over the dog.\"}\n"
                                     "{\"id\": [1, {\"a\": null}], \"text\": \"It was n\\u00f6t "
                                     "amused, \\ud83d\\ude00 but polite.\"}\n");
    qtool(&run,
          "calibrate llama -o clean/stats/a.qcal --data llama/ids.u16 --samples 1 --seqlen 16");
    if (!run_fault(&run, fine))
        qtool(&run,
              "calibrate llama -o clean/stats/b.qcal --data data/a.u16 --samples 1 --seqlen 12");
    if (!run_fault(&run, fine))
        qtool(&run, "quantize llama -o clean/box --scheme nf4 --tensor o_proj=mix24 "
                    "--tensor down_proj=w4ax --kv 4 --data llama/ids.u16 --samples 1 --seqlen 16");
    if (!run_fault(&run, fine))
        qtool(&run, "quantize nano -o whole --scheme lut3");
    if (run_fault(&run, fine)) {
        fprintf(stderr, "harness: %s: %s\n", run.command, run_fault(&run, fine));
        shell("cat err.txt >&2");
        exit(99);
    }
    interrupt_run(program);
    shell("mv out.partial clean; cp -a clean/. .");
}

/* ---- a case --------------------------------------------------------------------------------- */

/* Replaces FILE in the command by the name of a PyTorch file, which is returned. */
static const char *choose_file(char *command, size_t size, const char *text)
{
    static const char *const files[] = {
        "deflated.bin", "expanded.pt", "float4.pt",      "float8.pt", "halves.pt",    "legacy.pt",
        "list.pt",      "marked.pt",   "module.pt",      "nested.pt", "parameter.pt", "plain.bin",
        "protocol4.pt", "shared.bin",  "transposed.pth", "wide.pt",
    };
    const char *file = files[below(sizeof files / sizeof *files)], *mark = strstr(text, "FILE");
    snprintf(command, size, "%.*s%s%s", (int)(mark - text), text, file, mark + 4);
    return file;
}

/* What is wrong with what the run left, or NULL. */
static const char *output_fault(struct run *run, const struct target *t)
{
    static const int sound[] = {0, -1};
    const bool made = access("out", F_OK) == 0;
    if (run->status != 0 && made)
        return "it failed and left its output";
    if (run->status != 6 && t->allowed != resuming && access("out.partial", F_OK) == 0)
        return "it left a part of its output";
    if (!made || strncmp(run->command, "qtool quantize", 14) != 0)
        return NULL;
    if (t->allowed == resuming && t->mutate != mutate_journal &&
        system("diff -rq -x qtool-report.json whole out >/dev/null") != 0)
        return "the resumed container differs from the whole one";
    qtool(run, "verify out");
    return t->mutate == mutate_journal ? NULL : run_fault(run, sound);
}

/* Compares the figures of eval; the checksum of the manifest tells its form. */
static bool same_figures(void)
{
    return system("grep -v manifest_crc32 clean.txt >clean.figures; "
                  "grep -v manifest_crc32 out.txt | cmp -s clean.figures -") == 0;
}

/* How the run differs from that on the clean file, or NULL. `inspect` and messages tell the form of
 * the file, so that only figures of eval and containers must be equal. */
static const char *difference(const struct run *clean, const struct run *run)
{
    const bool eval = strncmp(run->command, "qtool eval", 10) == 0;
    if (run->status != clean->status)
        return "the same file in another form gives another status";
    if (eval && run->status == 0 && !same_figures())
        return "the same file in another form gives other figures";
    if (access("clean.out/model.safetensors", F_OK) == 0 &&
        system("cmp -s clean.out/model.safetensors out/model.safetensors") != 0)
        return "the same file in another form gives another container";
    return NULL;
}

/* Replaces the file at `path` by a changed copy, or one in another form. A compressed file is made
 * from the plain one: its name is in the command. */
static void change_file(const struct target *t, const char *path, bool same, bool compressed)
{
    char target[520];
    struct bytes b = bytes_read(path);
    snprintf(target, sizeof target, "%s%s", path, compressed ? ".gz" : "");
    if (same)
        t->restyle(&b);
    else
        for (size_t changes = compressed ? 1 : 1 + below(3); changes > 0; changes--)
            t->mutate(&b);
    bytes_write(target, b);
    bytes_free(&b);
    if (t->sign)
        t->sign(t->dir);
}

/* Makes the directory of the case anew, and that of the last case. */
static void clean_up(const char *dir)
{
    static const char *last = "";
    shell("rm -rf out out.partial clean.out %s; cp -a clean/%s .", dir, dir);
    if (*last && strcmp(last, dir) != 0)
        shell("rm -rf %s; cp -a clean/%s .", last, last);
    last = strcmp(dir, "out.partial") == 0 ? "" : dir;
}

static bool passes(uint64_t seed)
{
    random_start(seed);
    const struct target *t = &targets[seed % TARGETS];
    const bool same = t->restyle && below(4) == 0;
    size_t count = 0;
    while (count < sizeof t->commands / sizeof *t->commands && t->commands[count])
        count++;
    const char *command = t->commands[below(count)], *file = t->file;
    const bool compressed = strstr(command, ".gz") != NULL;
    char with_file[256], path[512];
    struct run run, clean = {.status = -1};
    if (!file) {
        file = choose_file(with_file, sizeof with_file, command);
        command = with_file;
    }
    clean_up(t->dir);
    snprintf(path, sizeof path, "%s/%s", t->dir, file);
    if (same) {
        if (compressed)
            shell("gzip -k %s", path);
        qtool(&clean, "%s", command);
        shell("mv out.txt clean.txt; if [ -e out ]; then mv out clean.out; fi");
    }
    change_file(t, path, same, compressed);
    qtool(&run, "%s", command);
    const char *fault = run_fault(&run, t->allowed);
    if (!fault && same)
        fault = difference(&clean, &run);
    if (!fault)
        fault = output_fault(&run, t);
    if (!fault)
        return true;
    printf("FAIL %s: status %d: %s\n  repeat: QT_SEED=%llu mutants QTOOL 1\n", run.command,
           run.status, fault, (unsigned long long)seed);
    fflush(stdout);
    shell("head -c 2000 err.txt");
    return false;
}

int main(int argc, char **argv)
{
    const char *seed_text = getenv("QT_SEED");
    const uint64_t seed = seed_text ? strtoull(seed_text, NULL, 10) : (uint64_t)time(NULL);
    size_t cases = argc > 2            ? strtoull(argv[2], NULL, 10)
                   : getenv("QT_FULL") ? 300 * TARGETS
                                       : 6 * TARGETS;
    size_t failed = 0;
    char root[4096];
    if (argc < 2 || cases == 0) {
        fprintf(stderr, "usage: mutants QTOOL [CASES]\n");
        return 2;
    }
    printf("QT_SEED=%llu, %zu cases\n", (unsigned long long)seed, cases);
    char *program = realpath(argv[1], NULL);
    robust_begin(argv[1], root);
    make_clean(root, program);
    for (size_t i = 0; i < cases; i++)
        failed += !passes(seed + i);
    robust_end(failed > 0 && cases == 1);
    free(program);
    printf("%zu passed, %zu failed, 0 skipped\n", cases - failed, failed);
    return failed > 0;
}
