/* generate: continues a text. */
#include "cli/cli.h"

#include "kernels/kernels.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

enum { MOST_PROMPT = 64 << 20, MOST_TOKENS = 128, MOST_BATCH = 1024 };

struct generate_options {
    struct common_options common;
    const char *prompt, *prompt_file;
    size_t tokens, batch, seed, top_k;
    double temperature, top_p;
    int bos;
    bool chat, ignore_eos;
    int runtime; /* enum runtime */
    struct kv_options kv;
};

/* A run: what becomes of one prompt. */
struct generation {
    const struct generate_options *o;
    struct cli *cli;
    const struct source *source;
    struct qt_model *model;
    struct qt_tokenizer *tok;
    struct qt_detokenizer *detok;
    struct qt_stops stops;
    uint32_t *prompt;
    size_t prompt_count, most; /* most: tokens of a sequence, the prompt's included */
    uint32_t *ids;             /* [batch][most] */
    size_t *count;             /* [batch] tokens so far */
    bool *ended;               /* [batch] by a token of `stops` */
    double prompt_seconds, seconds;
    size_t shown; /* bytes of the first sequence's text on stdout */
};

/* ---- the prompt ----------------------------------------------------------------------------- */

/* Reads a file or pipe of at most MOST_PROMPT bytes. */
static int read_stream(char **text, size_t *size, FILE *f, const char *name, struct qt_err *err)
{
    size_t capacity = 0, n = 1;
    int rc = QT_OK;
    *size = 0;
    while (n) {
        QT_TRY(qt_array_grow(text, &capacity, *size + 4096, 1, err));
        n = fread(*text + *size, 1, 4095, f);
        *size += n;
        if (*size > MOST_PROMPT)
            return qt_fail(err, QT_E_UNSUPPORTED, name, NULL, "has more than %d MiB",
                           MOST_PROMPT >> 20);
    }
    if (ferror(f))
        return qt_fail(err, QT_E_RESOURCE, name, NULL, "cannot read: %s", strerror(errno));
done:
    return rc;
}

static int read_file(char **text, size_t *size, const char *path, struct qt_err *err)
{
    if (strcmp(path, "-") == 0)
        return read_stream(text, size, stdin, "standard input", err);
    if (qt_path_is_dir(path))
        return qt_fail(err, QT_E_INPUT, path, NULL, "not a regular file");
    FILE *f = fopen(path, "re");
    if (!f)
        return qt_fail(err, QT_E_INPUT, path, NULL, "cannot open: %s", strerror(errno));
    int rc = read_stream(text, size, f, path, err);
    fclose(f);
    return rc;
}

static int read_text(char **text, size_t *size, const struct generate_options *o,
                     struct qt_err *err)
{
    if (o->prompt_file)
        return read_file(text, size, o->prompt_file, err);
    *size = strlen(o->prompt);
    return qt_string_copy(text, o->prompt, err);
}

/* Replaces the text by a conversation whose only message it is. */
static int apply_template(char **text, size_t *size, const char *dir, struct qt_err *err)
{
    json_t *messages = json_pack("[{s:s,s:s%}]", "role", "user", "content", *text, *size);
    struct qt_chat *chat = NULL;
    char *rendered = NULL;
    int rc;
    if (!messages)
        return qt_fail(err, QT_E_INPUT, NULL, NULL, "the prompt is not UTF-8");
    QT_TRY(qt_chat_open(&chat, dir, err));
    QT_TRY(qt_chat_render(&rendered, size, chat, messages, NULL, true, err));
    qt_free(*text);
    *text = rendered;
done:
    qt_chat_close(chat);
    json_decref(messages);
    return rc;
}

static int read_prompt(struct generation *g, struct qt_err *err)
{
    const char *dir = g->source->weights.dir;
    const size_t vocab = qt_model_info(g->model)->vocab;
    const struct qt_encode_options opt = {
        .special = !g->o->chat, .bos = (enum qt_bos)g->o->bos, .interrupted = interrupt_came};
    const char *name = !g->o->prompt_file                    ? "--prompt"
                       : strcmp(g->o->prompt_file, "-") == 0 ? "standard input"
                                                             : g->o->prompt_file;
    char *text = NULL;
    size_t size;
    int rc;
    QT_TRY(read_text(&text, &size, g->o, err));
    if (g->o->chat)
        QT_TRY(apply_template(&text, &size, dir, err));
    QT_TRY(qt_tokenizer_encode_most(&g->prompt, &g->prompt_count, g->tok, text, size, &opt, err));
    if (g->prompt_count == 0)
        rc = qt_fail(err, QT_E_INPUT, name, NULL, "has no tokens");
    for (size_t i = 0; rc == QT_OK && i < g->prompt_count; i++)
        if (g->prompt[i] >= vocab)
            rc = qt_fail(err, QT_E_INPUT, dir, NULL,
                         "token id %u of the prompt is outside the model's vocabulary of %zu "
                         "tokens",
                         (unsigned)g->prompt[i], vocab);
done:
    if (rc == QT_E_INPUT && !err->file[0])
        snprintf(err->file, sizeof err->file, "%s", name);
    qt_free(text);
    return rc;
}

/* ---- output --------------------------------------------------------------------------------- */

/* Text of the generated tokens of a sequence. The last tokens of the prompt are decoded with them,
 * because the text of a token can depend on those before it. *text is freed with qt_free; *from =
 * the first byte that is not the prompt's. */
static int text_of(char **text, size_t *from, size_t *size, const struct generation *g,
                   size_t sequence, struct qt_err *err)
{
    enum { CONTEXT = 16 };
    const size_t skip = g->prompt_count - qt_min_size(CONTEXT, g->prompt_count);
    const uint32_t *ids = g->ids + sequence * g->most;
    const size_t count = g->count[sequence] - (g->ended[sequence] ? 1 : 0);
    char *prompt = NULL;
    int rc;
    *text = NULL;
    QT_TRY(qt_detokenize(&prompt, from, g->detok, ids + skip, g->prompt_count - skip, err));
    QT_TRY(qt_detokenize(text, size, g->detok, ids + skip, count - skip, err));
    *from = qt_min_size(*from, *size);
done:
    qt_free(prompt);
    return rc;
}

/* Size of the text without what may be the beginning of a character. */
static size_t complete(const char *text, size_t size)
{
    while (size >= 3 && memcmp(text + size - 3, "\xef\xbf\xbd", 3) == 0)
        size -= 3;
    return size;
}

/* Terminals get no control characters but newlines and tabs. */
static void print_text(const char *text, size_t size)
{
    const bool terminal = isatty(STDOUT_FILENO);
    for (size_t i = 0; i < size; i++) {
        const unsigned char c = (unsigned char)text[i];
        putchar(terminal && (c < ' ' || c == 0x7f) && c != '\n' && c != '\t' ? '?' : c);
    }
    fflush(stdout);
}

/* Prints what is new in the only sequence. */
static int show(struct generation *g, bool last, struct qt_err *err)
{
    char *text;
    size_t from, size;
    int rc;
    if (g->cli->doc || g->o->batch > 1)
        return QT_OK;
    QT_TRY(text_of(&text, &from, &size, g, 0, err));
    size = last ? size : complete(text, size);
    if (size > from + g->shown) {
        ui_clear(&g->cli->ui);
        print_text(text + from + g->shown, size - from - g->shown);
        g->shown = size - from;
    }
done:
    qt_free(text);
    return rc;
}

static int print_all(const struct generation *g, struct qt_err *err)
{
    int rc = QT_OK;
    if (g->o->batch == 1)
        print_text("\n", 1);
    for (size_t i = 0; g->o->batch > 1 && i < g->o->batch; i++) {
        char *text;
        size_t from, size;
        QT_TRY(text_of(&text, &from, &size, g, i, err));
        printf("%s---- %zu ----\n", i ? "\n" : "", i + 1);
        print_text(text + from, size - from);
        putchar('\n');
        qt_free(text);
    }
done:
    return rc;
}

static int fill_doc(const struct generation *g, struct qt_err *err)
{
    struct cli *cli = g->cli;
    json_t *list = json_array();
    int rc = QT_OK;
    doc_set(cli, cli->doc, "prompt_tokens", doc_size(g->prompt_count));
    doc_set(cli, cli->doc, "prompt_seconds", doc_real(g->prompt_seconds));
    doc_set(cli, cli->doc, "seconds", doc_real(g->seconds));
    for (size_t i = 0; i < g->o->batch; i++) {
        json_t *item = json_object(), *ids = json_array();
        char *text;
        size_t from, size;
        QT_TRY(text_of(&text, &from, &size, g, i, err));
        for (size_t j = g->prompt_count; j < g->count[i]; j++)
            doc_append(cli, ids, doc_size(g->ids[i * g->most + j]));
        doc_set(cli, item, "text", doc_text(text + from));
        doc_set(cli, item, "ids", ids);
        doc_set(cli, item, "end", doc_text(g->ended[i] ? "eos" : "length"));
        doc_append(cli, list, item);
        qt_free(text);
    }
done:
    doc_set(cli, cli->doc, "sequences", list);
    return rc;
}

/* ---- generation ----------------------------------------------------------------------------- */

static struct qt_sampling sampling_of(const struct generate_options *o)
{
    return (struct qt_sampling){
        .temperature = o->temperature, .top_p = o->top_p, .top_k = o->top_k, .seed = o->seed};
}

/* The model runs on a decoder over a backend, or on the fused runtime. */
struct engine {
    struct qt_backend *be;
    struct qt_decoder *decoder;
    struct qt_gpu *gpu;
    struct qt_runtime *runtime;
    float *logits; /* [batch][vocab] after a step; NULL: the runtime chooses */
};

/* The runtime with the sequences' memory. */
static int engine_open_fused(struct engine *e, const struct generation *g, struct qt_err *err)
{
    const struct generate_options *o = g->o;
    const struct qt_runtime_options opt = {.sequences = o->batch,
                                           .capacity = g->most,
                                           .prompt = g->prompt_count,
                                           .kv4 = o->kv.bits != 0,
                                           .sampling = sampling_of(o),
                                           .log = &g->cli->log};
    int rc;
    QT_TRY(qt_gpu_open(&e->gpu, device_number(o->common.device), err));
    QT_TRY(qt_runtime_open(&e->runtime, e->gpu, g->model, &g->source->weights, g->source->container,
                           &opt, err));
done:
    if (rc == QT_E_UNSUPPORTED && !err->file[0])
        snprintf(err->file, sizeof err->file, "%s", g->source->weights.dir);
    return rc;
}

static int engine_open(struct engine *e, const struct generation *g, const struct qt_weights *w,
                       struct qt_err *err)
{
    const struct generate_options *o = g->o;
    const bool fused = runtime_is_fused(o->runtime, o->common.device);
    int rc = QT_OK;
    *e = (struct engine){.be = NULL};
    if (!fused)
        QT_TRY(qt_array_new(&e->logits, o->batch,
                            qt_model_info(g->model)->vocab * sizeof *e->logits, err));
    if (fused)
        return engine_open_fused(e, g, err);
    QT_TRY(backend_open(&e->be, o->common.device, err));
    QT_TRY(qt_decoder_open(&e->decoder, g->model, w, e->be, o->batch, g->most, &g->cli->log, err));
done:
    return rc;
}

static void engine_close(struct engine *e)
{
    qt_decoder_close(e->decoder);
    qt_runtime_close(e->runtime);
    if (e->be)
        e->be->close(e->be);
    if (e->gpu)
        e->gpu->close(e->gpu);
    qt_free(e->logits);
}

/* Appends ids[batch][tokens] to the sequences. Without logits, ids[batch] = the next tokens. */
static int engine_run(struct engine *e, uint32_t *ids, size_t tokens, bool prompt,
                      struct qt_err *err)
{
    int rc = QT_OK;
    if (e->decoder)
        return qt_decoder_run(e->decoder, e->logits, ids, tokens, err);
    QT_TRY(prompt ? qt_runtime_prompt(e->runtime, ids, tokens, NULL, err)
                  : qt_runtime_step(e->runtime, err));
    QT_TRY(qt_runtime_read(e->runtime, ids, NULL, err));
done:
    return rc;
}

/* Appends the next token of each sequence: the given one, or one by the logits. A sequence that has
 * ended goes on in the decoder, but keeps its tokens. */
static int choose(struct generation *g, uint32_t *next, const float *logits, struct qt_err *err)
{
    const struct generate_options *o = g->o;
    const struct qt_sampling how = sampling_of(o);
    const size_t vocab = qt_model_info(g->model)->vocab;
    int rc = QT_OK;
    for (size_t i = 0; i < o->batch; i++) {
        if (logits)
            QT_TRY(qt_sample(&next[i], logits + i * vocab, vocab, &how, i, g->count[i], err));
        if (g->ended[i])
            continue;
        g->ids[i * g->most + g->count[i]++] = next[i];
        g->ended[i] = !o->ignore_eos && qt_stops_at(&g->stops, next[i]);
    }
done:
    return rc;
}

static bool all_ended(const struct generation *g)
{
    for (size_t i = 0; i < g->o->batch; i++)
        if (!g->ended[i] && g->count[i] < g->most)
            return false;
    return true;
}

static int decode(struct generation *g, struct engine *e, struct qt_err *err)
{
    const size_t batch = g->o->batch;
    uint32_t *next = NULL;
    double start = qt_clock();
    int rc;
    QT_TRY(qt_array_new(&next, batch, g->prompt_count * sizeof *next, err));
    for (size_t i = 0; i < batch; i++) {
        memcpy(next + i * g->prompt_count, g->prompt, g->prompt_count * sizeof *next);
        memcpy(g->ids + i * g->most, g->prompt, g->prompt_count * sizeof *next);
        g->count[i] = g->prompt_count;
    }
    QT_TRY(engine_run(e, next, g->prompt_count, true, err));
    g->prompt_seconds = qt_clock() - start;
    start = qt_clock();
    for (;;) {
        QT_TRY(choose(g, next, e->logits, err));
        if (all_ended(g))
            break;
        QT_TRY(show(g, false, err));
        if (ferror(stdout)) /* the reader of a pipe has ended */
            break;
        QT_TRY(engine_run(e, next, 1, false, err));
    }
    g->seconds = qt_clock() - start;
    QT_TRY(show(g, true, err));
done:
    qt_free(next);
    return rc;
}

static int generate(struct generation *g, struct qt_err *err)
{
    const struct generate_options *o = g->o;
    struct qt_weights w = g->source->weights;
    const size_t positions = qt_model_info(g->model)->max_positions;
    struct engine engine = {.be = NULL};
    struct qt_kv kv = {0};
    int rc = QT_OK;
    if (g->prompt_count >= positions)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "the prompt has %zu tokens, but the model has %zu positions",
                       g->prompt_count, positions);
    g->most = g->prompt_count + qt_min_size(o->tokens, positions - g->prompt_count);
    if (o->kv.bits) {
        QT_TRY(kv_open(&kv, &o->kv, g->source, err));
        QT_TRY(runtime_check_kv(o->runtime, o->common.device, kv.keys, err));
        w.fake_quant.cache = qt_kv_apply;
        w.fake_quant.cache_ctx = &kv;
    }
    QT_TRY(qt_array_new(&g->ids, o->batch, g->most * sizeof *g->ids, err));
    QT_TRY(qt_array_new(&g->count, o->batch, sizeof *g->count, err));
    QT_TRY(qt_array_new(&g->ended, o->batch, sizeof *g->ended, err));
    QT_TRY(engine_open(&engine, g, &w, err));
    ui_clear(&g->cli->ui);
    QT_TRY(decode(g, &engine, err));
done:
    engine_close(&engine);
    qt_kv_free(&kv);
    return rc;
}

/* ---- the command ---------------------------------------------------------------------------- */

static void tell_speed(const struct generation *g)
{
    size_t tokens = 0;
    for (size_t i = 0; i < g->o->batch; i++)
        tokens += g->count[i] - g->prompt_count;
    const double speed = g->seconds > 0 ? (double)tokens / g->seconds : 0.0;
    qt_log_message(&g->cli->log, QT_LOG_INFO,
                   "%zu tokens of prompt in %.2f s; %zu tokens in %.2f s: %.*f tokens/s",
                   g->prompt_count * g->o->batch, g->prompt_seconds, tokens, g->seconds,
                   speed < 100 ? 2 : 0, speed);
}

static int check_options(const struct generate_options *o, struct qt_err *err)
{
    if (!o->prompt && !o->prompt_file)
        return qt_fail(err, QT_E_USAGE, NULL, NULL, "give --prompt or --prompt-file");
    if (o->prompt && o->prompt_file)
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--prompt and --prompt-file cannot be used together");
    if (o->temperature == 0 && (o->top_k || o->top_p < 1))
        return qt_fail(err, QT_E_USAGE, NULL, NULL,
                       "--top-k and --top-p need --temperature: without it the most probable token "
                       "is always chosen");
    return runtime_check(o->runtime, o->common.device, err);
}

static int run(struct cli *cli, const void *options, const char *const *args, struct qt_err *err)
{
    struct source source = {0};
    struct generation g = {.o = options, .cli = cli, .source = &source};
    enum qt_kv_keys keys;
    int rc;
    QT_TRY(kv_options_keys(&keys, &g.o->kv, err));
    QT_TRY(check_options(g.o, err));
    QT_TRY(source_open_whole(&source, args[0], cli, err));
    QT_TRY(source_check_agreement(&source, err));
    QT_TRY(qt_model_open(&g.model, &source.weights, err));
    QT_TRY(qt_tokenizer_open(&g.tok, source.weights.dir, err));
    QT_TRY(qt_detokenizer_open(&g.detok, g.tok, source.weights.dir, err));
    QT_TRY(qt_stops_read(&g.stops, source.weights.dir, err));
    QT_TRY(read_prompt(&g, err));
    QT_TRY(generate(&g, err));
    if (cli->doc)
        QT_TRY(fill_doc(&g, err));
    else
        QT_TRY(print_all(&g, err));
    tell_speed(&g);
done:
    qt_free(g.prompt);
    qt_free(g.ids);
    qt_free(g.count);
    qt_free(g.ended);
    qt_detokenizer_close(g.detok);
    qt_tokenizer_close(g.tok);
    qt_model_close(g.model);
    source_close(&source);
    return rc;
}

static const struct generate_options defaults = {.common = COMMON_DEFAULTS,
                                                 .tokens = MOST_TOKENS,
                                                 .batch = 1,
                                                 .top_p = 1,
                                                 .runtime = RUNTIME_DEFAULT,
                                                 .kv = KV_DEFAULTS};

#define AT(member) offsetof(struct generate_options, member)

static const struct opt opts[] = {
    {.name = "prompt",
     .letter = 'p',
     .kind = OPT_STRING,
     .offset = AT(prompt),
     .metavar = "TEXT",
     .help = "text to continue"},
    {.name = "prompt-file",
     .kind = OPT_STRING,
     .offset = AT(prompt_file),
     .metavar = "FILE",
     .help = "file with the text to continue; - is standard input"},
    {.name = "chat",
     .kind = OPT_FLAG,
     .offset = AT(chat),
     .help = "the text is a user's message: put it into the chat template of PATH"},
    {.name = "max-tokens",
     .kind = OPT_SIZE,
     .offset = AT(tokens),
     .metavar = "N",
     .min = 1,
     .max = 1 << 24,
     .help = "tokens to generate (default 128), or as many as the model has positions for"},
    {.name = "temperature",
     .kind = OPT_REAL,
     .offset = AT(temperature),
     .metavar = "T",
     .max = 100,
     .help = "divides the logits; 0 (default): always the most probable token"},
    {.name = "top-p",
     .kind = OPT_REAL,
     .offset = AT(top_p),
     .metavar = "P",
     .max = 1,
     .help = "draw from the most probable tokens that have probability P together (default 1)"},
    {.name = "top-k",
     .kind = OPT_SIZE,
     .offset = AT(top_k),
     .metavar = "K",
     .max = 1 << 24,
     .help = "draw from the K most probable tokens (default 0: all)"},
    {.name = "seed",
     .kind = OPT_SIZE,
     .offset = AT(seed),
     .metavar = "N",
     .max = INT64_MAX,
     .help = "of the random numbers (default 0)"},
    {.name = "batch",
     .kind = OPT_SIZE,
     .offset = AT(batch),
     .metavar = "B",
     .min = 1,
     .max = MOST_BATCH,
     .help = "continue the text B times, each time with other random numbers (default 1)"},
    {.name = "ignore-eos",
     .kind = OPT_FLAG,
     .offset = AT(ignore_eos),
     .help = "go on after a token that ends a text"},
    RUNTIME_OPT(struct generate_options, runtime,
                "how a GPU runs the model: fused (the default), on the kernels that ship, or "
                "reference, with weights dequantized to FP32 (for models that fused does not "
                "support)"),
    BOS_OPT(struct generate_options, bos),
    KV_OPTS(struct generate_options, kv,
            "4-bit KV cache; the reference simulates it: attention uses keys and values as it "
            "would read them from the cache",
            KV_KEYS_HELP "as the container was made, otherwise channel"),
    {0},
};

static const struct opt_positional positionals[] = {
    {"PATH", "checkpoint or container with config.json and tokenizer.json"},
    {0},
};

const struct command cmd_generate = {
    .name = "generate",
    .summary = "continue a text",
    .description =
        "Runs the model and prints the text that follows the prompt, token by token, until a token "
        "ends the text (eos_token_id of generation_config.json or config.json) or until "
        "--max-tokens have been generated. Checksums of containers are checked first. The same "
        "prompt, options and machine give the same text.\n\n"
        "A CPU, and a GPU with --runtime reference, dequantize the weights to FP32 and hold all of "
        "them in memory: this shows what a model says, not how fast runtimes serve it. With "
        "--device cuda, packed weights stay packed and run on the fused kernels, with FP16 "
        "activations; all other matrices are FP16.\n\n"
        "With --json, the document has the token ids and the text of each sequence.",
    .examples =
        "  qtool generate examples/nano-llama --prompt 'Once upon a time'\n"
        "  qtool generate nano-nf4 --prompt-file story.txt --temperature 0.8 --top-p 0.95\n"
        "  qtool generate model-int4 --chat --prompt 'What is quantization?' --device cuda\n",
    .opts = opts,
    .positionals = positionals,
    .defaults = &defaults,
    .options_size = sizeof defaults,
    .gpu = true,
    .run = run,
};
