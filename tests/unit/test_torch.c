/* PyTorch checkpoints: files by the real torch.save (tests/golden/torch, see
 * tests/oracle/make_torch_golden.py) and hostile archives and pickles made here. */
#include "formats/formats.h"
#include "tests/unit/fixture.h"

#define GOLDEN(name) "tests/golden/torch/" name

static struct qt_ckpt *open_ok(const char *path)
{
    struct qt_err err = {0};
    struct qt_ckpt *ckpt;
    expect_ok(path, qt_ckpt_open(&ckpt, path, &err), &err);
    return ckpt;
}

/* The values of a tensor as FP32; freed with qt_free. */
static float *values(const struct qt_ckpt *ckpt, const char *name, enum qt_dtype dtype, int ndim,
                     size_t d0, size_t d1)
{
    struct qt_err err = {0};
    struct qt_blob blob;
    float *out;
    const struct qt_tensor *t = qt_ckpt_find(ckpt, name);
    assert_non_null(t);
    assert_int_equal(t->dtype, dtype);
    assert_int_equal(t->ndim, ndim);
    if (ndim > 0)
        assert_int_equal(t->shape[0], d0);
    if (ndim > 1)
        assert_int_equal(t->shape[1], d1);
    expect_ok(name, qt_ckpt_read(&blob, ckpt, t, &err), &err);
    assert_int_equal(blob.size, t->nbytes);
    expect_ok(name, qt_array_new(&out, t->count, sizeof *out, &err), &err);
    qt_to_f32(out, blob.data, t->dtype, t->count);
    qt_blob_free(&blob);
    return out;
}

/* Element i of the tensor is element `from + i * step` of a ramp 0, 1/4, 2/4, ... */
static void expect_ramp(const struct qt_ckpt *ckpt, const char *name, enum qt_dtype dtype, int ndim,
                        size_t d0, size_t d1, size_t from, size_t step)
{
    size_t n = qt_ckpt_find(ckpt, name)->count;
    float *x = values(ckpt, name, dtype, ndim, d0, d1);
    for (size_t i = 0; i < n; i++)
        assert_true(x[i] == (float)(from + i * step) / 4);
    qt_free(x);
}

/* ---- files by torch.save -------------------------------------------------------------------- */

static void test_plain(void **state)
{
    (void)state;
    static const char *const files[] = {GOLDEN("plain.bin"), GOLDEN("deflated.bin"),
                                        GOLDEN("protocol4.pt")};
    for (size_t i = 0; i < 3; i++) {
        struct qt_ckpt *ckpt = open_ok(files[i]);
        assert_int_equal(qt_ckpt_count(ckpt), i == 2 ? 2 : 3);
        assert_string_equal(qt_ckpt_tensor(ckpt, 0)->name, "w");
        assert_string_equal(qt_ckpt_tensor(ckpt, 1)->name, "b");
        expect_ramp(ckpt, "w", QT_F32, 2, 3, 5, 0, 1);
        expect_ramp(ckpt, "b", QT_F32, 1, 5, 0, 0, 1);
        if (i < 2) {
            const struct qt_tensor *n = qt_ckpt_find(ckpt, "n");
            struct qt_blob blob;
            struct qt_err err = {0};
            int64_t seven;
            assert_int_equal(n->dtype, QT_I64);
            assert_int_equal(n->ndim, 0);
            expect_ok("n", qt_ckpt_read(&blob, ckpt, n, &err), &err);
            assert_int_equal(blob.size, 8);
            memcpy(&seven, blob.data, 8);
            assert_int_equal(seven, 7);
            qt_blob_free(&blob);
        }
        qt_ckpt_close(ckpt);
    }
}

static void test_dtypes(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("halves.pt"));
    expect_ramp(ckpt, "h", QT_F16, 2, 4, 4, 0, 1);
    expect_ramp(ckpt, "b", QT_BF16, 2, 4, 4, 0, 1);
    expect_ramp(ckpt, "d", QT_F64, 1, 2, 0, 0, 1);
    expect_ramp(ckpt, "empty", QT_F32, 2, 0, 4, 0, 1);
    qt_ckpt_close(ckpt);
}

/* Storages of bytes, whose tensors have the dtype (_rebuild_tensor_v3). */
static void test_untyped(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("float8.pt"));
    static const struct {
        const char *name;
        enum qt_dtype dtype;
        const char *bytes;
        size_t size;
    } want[] = {
        {"w", QT_F8_E4M3, "\0\1\2\3\4\5\6\7\10\11\12\13\14\15\16", 15},
        {"t", QT_F8_E4M3, "\0\5\12\1\6\13\2\7\14\3\10\15\4\11\16", 15},
        {"u", QT_U16, "\1\0\2\0\3\0\377\377", 8},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const struct qt_tensor *t = qt_ckpt_find(ckpt, want[i].name);
        struct qt_blob blob;
        struct qt_err err = {0};
        assert_non_null(t);
        assert_int_equal(t->dtype, want[i].dtype);
        expect_ok(want[i].name, qt_ckpt_read(&blob, ckpt, t, &err), &err);
        assert_int_equal(blob.size, want[i].size);
        assert_memory_equal(blob.data, want[i].bytes, want[i].size);
        qt_blob_free(&blob);
    }
    expect_ramp(ckpt, "h", QT_F16, 1, 4, 0, 0, 1);
    qt_ckpt_close(ckpt);
}

static void test_views(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("shared.bin"));
    expect_ramp(ckpt, "embed", QT_F32, 2, 6, 4, 0, 1);
    expect_ramp(ckpt, "head", QT_F32, 2, 6, 4, 0, 1);
    expect_ramp(ckpt, "row", QT_F32, 1, 4, 0, 8, 1);
    qt_ckpt_close(ckpt);

    ckpt = open_ok(GOLDEN("transposed.pth"));
    float *t = values(ckpt, "t", QT_F32, 2, 4, 3);
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < 3; j++)
            assert_true(t[i * 3 + j] == (float)(j * 4 + i) / 4);
    float *p = values(ckpt, "p", QT_F32, 3, 4, 2);
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < 2; j++)
            for (size_t k = 0; k < 3; k++)
                assert_true(p[(i * 2 + j) * 3 + k] == (float)((j * 3 + k) * 4 + i) / 4);
    float *s = values(ckpt, "s", QT_F32, 2, 3, 3);
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < 3; j++)
            assert_true(s[i * 3 + j] == (float)((i + 1) * 6 + 2 * j) / 4);
    qt_free(t);
    qt_free(p);
    qt_free(s);
    qt_ckpt_close(ckpt);
}

/* Replaces qt_crc32 at link time. */
static unsigned sums;
uint32_t __real_qt_crc32(uint32_t crc, const void *data, size_t size);
uint32_t __wrap_qt_crc32(uint32_t crc, const void *data, size_t size);
uint32_t __wrap_qt_crc32(uint32_t crc, const void *data, size_t size)
{
    sums++;
    return __real_qt_crc32(crc, data, size);
}

/* "embed" and "head" are the same view of a storage, "row" is a part of it. */
static void test_shared(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("shared.bin"));
    size_t shared = 0;
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++) {
        const char *earlier = qt_ckpt_shares(ckpt, i);
        shared += earlier != NULL;
        if (strcmp(qt_ckpt_tensor(ckpt, i)->name, "embed") == 0)
            assert_null(earlier);
        else
            assert_string_equal(earlier, "embed");
    }
    assert_int_equal(shared, 2);
    qt_ckpt_close(ckpt);
    ckpt = open_ok(GOLDEN("plain.bin"));
    for (size_t i = 0; i < qt_ckpt_count(ckpt); i++)
        assert_null(qt_ckpt_shares(ckpt, i));
    qt_ckpt_close(ckpt);
}

/* A CRC per view would take hours for thousands of views of a large storage. */
static void test_checked_once(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("shared.bin"));
    sums = 0;
    for (int i = 0; i < 3; i++) {
        expect_ramp(ckpt, "row", QT_F32, 1, 4, 0, 8, 1);
        expect_ramp(ckpt, "head", QT_F32, 2, 6, 4, 0, 1);
    }
    assert_int_equal(sums, 1);
    qt_ckpt_close(ckpt);
}

static void test_modules(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("module.pt"));
    expect_ramp(ckpt, "weight", QT_F32, 2, 3, 4, 0, 1);
    expect_ramp(ckpt, "bias", QT_F32, 1, 3, 0, 0, 1);
    qt_ckpt_close(ckpt);
    ckpt = open_ok(GOLDEN("parameter.pt"));
    expect_ramp(ckpt, "w", QT_F32, 2, 3, 5, 0, 1);
    qt_ckpt_close(ckpt);
    ckpt = open_ok(GOLDEN("marked.pt"));
    assert_int_equal(qt_ckpt_count(ckpt), 1);
    expect_ramp(ckpt, "w", QT_F32, 2, 3, 5, 0, 1);
    qt_ckpt_close(ckpt);
    ckpt = open_ok(GOLDEN("nested.pt"));
    assert_int_equal(qt_ckpt_count(ckpt), 1);
    expect_ramp(ckpt, "w", QT_F32, 2, 3, 5, 0, 1);
    qt_ckpt_close(ckpt);
}

static void test_sharded(void **state)
{
    (void)state;
    struct qt_ckpt *ckpt = open_ok(GOLDEN("sharded"));
    assert_int_equal(qt_ckpt_count(ckpt), 3);
    assert_int_equal(qt_ckpt_file_count(ckpt), 2);
    expect_ramp(ckpt, "a", QT_F32, 2, 2, 2, 0, 1);
    expect_ramp(ckpt, "b", QT_F32, 1, 4, 0, 0, 1);
    expect_ramp(ckpt, "c", QT_F32, 1, 3, 0, 0, 1);
    qt_ckpt_close(ckpt);
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        enum qt_status status;
        const char *fragment;
    } cases[] = {
        {GOLDEN("evil.bin"), QT_E_INPUT, "pickle refers to posix.system: only tensors are allowed"},
        {GOLDEN("legacy.pt"), QT_E_UNSUPPORTED, "PyTorch before 1.6: load it with torch.load"},
        {GOLDEN("float4.pt"), QT_E_UNSUPPORTED, "torch.float4_e2m1fn_x2: tensors of this dtype"},
        {GOLDEN("list.pt"), QT_E_UNSUPPORTED, "holds no state dict"},
        {GOLDEN("wide.pt"), QT_E_UNSUPPORTED, "tensor x: is not a tensor: nested state dict"},
        {GOLDEN("expanded.pt"), QT_E_UNSUPPORTED,
         "tensor w: 1000 elements expanded from a storage of 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        expect_error(cases[i].path, qt_ckpt_open(&ckpt, cases[i].path, &err), cases[i].status,
                     cases[i].fragment, &err);
    }
}

/* ---- archives made here --------------------------------------------------------------------- */

struct archive {
    unsigned char bytes[4096];
    size_t size;
    unsigned char directory[1024];
    size_t directory_size;
    unsigned count;
};

static void put(unsigned char *p, uint64_t v, unsigned width)
{
    for (unsigned i = 0; i < width; i++)
        p[i] = (unsigned char)(v >> 8 * i);
}

static void add_entry(struct archive *a, const char *name, const void *data, size_t size)
{
    size_t n = strlen(name);
    unsigned char *local = a->bytes + a->size, *central = a->directory + a->directory_size;
    memcpy(local, "PK\3\4\x14\0", 6);
    put(local + 14, qt_crc32(0, data, size), 4);
    put(local + 18, size, 4);
    put(local + 22, size, 4);
    put(local + 26, n, 2);
    memcpy(local + 30, name, n);
    memcpy(local + 30 + n, data, size);
    memcpy(central, "PK\1\2\x14\0\x14\0", 8);
    memcpy(central + 16, local + 14, 12);
    put(central + 28, n, 2);
    put(central + 42, a->size, 4);
    memcpy(central + 46, name, n);
    a->size += 30 + n + size;
    a->directory_size += 46 + n;
    a->count++;
}

static void end_archive(struct archive *a)
{
    unsigned char *end = a->bytes + a->size + a->directory_size;
    memcpy(a->bytes + a->size, a->directory, a->directory_size);
    memcpy(end, "PK\5\6", 4);
    put(end + 8, a->count, 2);
    put(end + 10, a->count, 2);
    put(end + 12, a->directory_size, 4);
    put(end + 16, a->size, 4);
    a->size += a->directory_size + 22;
}

#define STRING(length, text) "X" length "\0\0\0" text
#define TYPE                 "ctorch\nFloatStorage\n"
#define REBUILD              "ctorch._utils\n_rebuild_tensor_v2\n"
#define STORAGE                                                                                    \
    "(" STRING("\7", "storage") TYPE STRING("\1", "0") STRING("\3", "cpu") "K\6t" /* 6 elements */ \
                                                                           "Q"
/* A call of _rebuild_tensor_v2; offset, size and stride are pickle code. */
#define TENSOR(offset, size, stride) REBUILD "(" STORAGE offset size stride "\x89}tR"
#define PLAIN                        TENSOR("K\0", "K\2K\3\x86", "K\3K\1\x86")
#define KEY                          STRING("\1", "w")
#define PICKLE(code)                 "\x80\2" code "."
#define GOOD                         PICKLE("}" KEY PLAIN "s")

static const float storage[6] = {0, 0.25f, 0.5f, 0.75f, 1, 1.25f};

static void make_archive(struct archive *a, const char *pickle, size_t size)
{
    *a = (struct archive){.size = 0};
    add_entry(a, "m/data.pkl", pickle, size);
    add_entry(a, "m/byteorder", "little", 6);
    add_entry(a, "m/data/0", storage, sizeof storage);
    end_archive(a);
}

static int open_archive(const char *dir, const struct archive *a, struct qt_err *err)
{
    struct qt_ckpt *ckpt;
    const char *path = fixture_write(dir, "m.pt", a->bytes, a->size);
    int rc = qt_ckpt_open(&ckpt, path, err);
    for (size_t i = 0; rc == QT_OK && i < qt_ckpt_count(ckpt); i++) {
        struct qt_blob blob;
        rc = qt_ckpt_read(&blob, ckpt, qt_ckpt_tensor(ckpt, i), err);
        qt_blob_free(&blob);
    }
    qt_ckpt_close(ckpt);
    return rc;
}

#define BYTES(s) s, sizeof s - 1

static const struct {
    const char *name, *code;
    size_t size;
    enum qt_status status;
    const char *fragment;
} pickles[] = {
    {"good", BYTES(GOOD), QT_OK, ""},
    {"plain values beside",
     BYTES(PICKLE("}(" KEY PLAIN STRING("\1", "e") "K\5" STRING(
         "\1", "f") "G\0\0\0\0\0\0\0\0" STRING("\1", "g") "Nu")),
     QT_OK, ""},
    {"memo",
     BYTES(PICKLE("}q\0" KEY "q\1" PLAIN "q\2sh\1"
                  "0h\0"
                  "0")),
     QT_OK, ""},
    {"long numbers",
     BYTES(PICKLE("}" KEY TENSOR("\x8a\0", "\x8a\1\2\x8a\2\3\0\x86", "\x8b\1\0\0\0\3K\1\x86") "s")),
     QT_OK, ""},
    {"wrapped", BYTES(PICKLE("}" STRING("\5", "model") "}" KEY PLAIN "ss")), QT_OK, ""},
    {"whole storage by any stride of one row",
     BYTES(PICKLE("}" KEY TENSOR("K\0", "K\1K\6\x86",
                                 "Kc"
                                 "K\1\x86") "s")),
     QT_OK, ""},
    {"no elements", BYTES(PICKLE("}" KEY TENSOR("K\x63", "K\0K\6\x86", "K\6K\1\x86") "s")), QT_OK,
     ""},

    {"empty", BYTES(""), QT_E_INPUT, "pickle: does not start with a PROTO instruction"},
    {"no protocol", BYTES("}."), QT_E_INPUT, "pickle: does not start with a PROTO instruction"},
    {"protocol 1", BYTES("\x80\1}."), QT_E_UNSUPPORTED, "pickle protocol 1, but 2 to 5"},
    {"protocol 6", BYTES("\x80\6}."), QT_E_UNSUPPORTED, "pickle protocol 6, but 2 to 5"},
    {"no stop", BYTES("\x80\2}"), QT_E_INPUT, "ends without a STOP"},
    {"bytes behind", BYTES(GOOD "."), QT_E_INPUT, "bytes after its STOP"},
    {"nothing left", BYTES(PICKLE("")), QT_E_INPUT, "does not leave exactly one value"},
    {"two left", BYTES(PICKLE("}}")), QT_E_INPUT, "does not leave exactly one value"},
    {"mark left", BYTES(PICKLE("(")), QT_E_INPUT, "not on its stack"},
    {"os.system", BYTES(PICKLE("cos\nsystem\n(" STRING("\2", "ls") "tR")), QT_E_INPUT,
     "pickle refers to os.system: only tensors are allowed"},
    {"eval by name",
     BYTES("\x80\4\x8c\x08"
           "builtins\x8c\4eval\x93."),
     QT_E_INPUT, "pickle refers to builtins.eval"},
    {"escape in a global", BYTES(PICKLE("c\x1b[2J\nx\n")), QT_E_INPUT, "pickle refers to ?[2J.x"},
    {"a suffix of an allowed name", BYTES(PICKLE("ctorch._utils\n_rebuild_tensor\n")),
     QT_E_UNSUPPORTED, "torch._utils._rebuild_tensor: tensors of this kind"},
    {"sparse tensor", BYTES(PICKLE("ctorch._utils\n_rebuild_sparse_tensor\n")), QT_E_UNSUPPORTED,
     "torch._utils._rebuild_sparse_tensor: tensors of this kind"},
    {"storage", BYTES(PICKLE("ctorch\nQInt8Storage\n")), QT_E_UNSUPPORTED,
     "torch.QInt8Storage: tensors of this kind"},
    {"dtype", BYTES(PICKLE("ctorch\ncomplex128\n")), QT_E_UNSUPPORTED,
     "torch.complex128: tensors of this dtype"},
    {"attribute path", BYTES(PICKLE("ctorch\nload.__globals__\n")), QT_E_INPUT,
     "torch.load.__globals__: only"},
    {"global unfinished", BYTES("\x80\2ctorch\nload"), QT_E_INPUT, "middle of an instruction"},
    {"global by numbers", BYTES("\x80\4K\1K\2\x93."), QT_E_INPUT,
     "name of a global is not a string"},
    {"inst", BYTES(PICKLE("(ios\nsystem\n")), QT_E_INPUT, "instruction 0x69 is not used"},
    {"obj", BYTES(PICKLE("(o")), QT_E_INPUT, "instruction 0x6f is not used"},
    {"newobj", BYTES(PICKLE("}}\x81")), QT_E_INPUT, "instruction 0x81 is not used"},
    {"extension", BYTES(PICKLE("\x82\1")), QT_E_INPUT, "instruction 0x82 is not used"},
    {"text persistent id", BYTES(PICKLE("Px\n")), QT_E_INPUT, "instruction 0x50 is not used"},
    {"call of a storage type", BYTES(PICKLE(TYPE ")R")), QT_E_INPUT,
     "calls a value that is not a function"},
    {"call of a dict", BYTES(PICKLE("})R")), QT_E_INPUT, "calls a value that is not a function"},
    {"call without tuple", BYTES(PICKLE(REBUILD "}R")), QT_E_INPUT,
     "calls a value that is not a function"},
    {"rebuild without storage", BYTES(PICKLE(REBUILD "(K\0K\1K\2K\3K\4K\5tR")), QT_E_INPUT,
     "_rebuild_tensor_v2 with unexpected"},
    {"rebuild with too few", BYTES(PICKLE(REBUILD "(" STORAGE "tR")), QT_E_INPUT,
     "_rebuild_tensor_v2 with unexpected"},
    {"parameter of a number", BYTES(PICKLE("ctorch._utils\n_rebuild_parameter\nK\1\x85R")),
     QT_E_INPUT, "_rebuild_parameter with unexpected"},
    {"ordered dict of items", BYTES(PICKLE("ccollections\nOrderedDict\n]\x85R")), QT_E_INPUT,
     "OrderedDict with arguments"},
    {"build of a tensor", BYTES(PICKLE(PLAIN "}b")), QT_E_INPUT,
     "sets the state of a value that is not a dict"},
    {"persistent id a string", BYTES(PICKLE(STRING("\1", "0") "Q")), QT_E_INPUT,
     "persistent id is not a storage"},
    {"persistent id of a module", BYTES(PICKLE("(" STRING("\6", "module") TYPE KEY KEY "K\6tQ")),
     QT_E_INPUT, "persistent id is not a storage"},
    {"persistent id without type", BYTES(PICKLE("(" STRING("\7", "storage") KEY KEY KEY "K\6tQ")),
     QT_E_INPUT, "persistent id is not a storage"},
    {"pop of nothing", BYTES(PICKLE("0")), QT_E_INPUT, "not on its stack"},
    {"tuple of nothing", BYTES(PICKLE("\x87")), QT_E_INPUT, "not on its stack"},
    {"tuple without mark", BYTES(PICKLE("K\1t")), QT_E_INPUT, "a mark is missing"},
    {"mark in a tuple", BYTES(PICKLE("(K\1\x86")), QT_E_INPUT, "not on its stack"},
    {"item of a list", BYTES(PICKLE("]K\1K\2s")), QT_E_INPUT,
     "sets items of a value that is not a dict"},
    {"append to a dict", BYTES(PICKLE("}K\1a")), QT_E_INPUT,
     "appends to a value that is not a list"},
    {"items of nothing", BYTES(PICKLE("(u")), QT_E_INPUT,
     "sets items of a value that is not a dict"},
    {"odd items", BYTES(PICKLE("}(K\1u")), QT_E_INPUT, "a dict item has no value"},
    {"memo not set", BYTES(PICKLE("h\5")), QT_E_INPUT, "memo entry that is not set"},
    {"memo gap", BYTES(PICKLE("}r\xff\xff\xff\x7f")), QT_E_INPUT, "memo entries out of order"},
    {"memo of nothing", BYTES(PICKLE("q\0")), QT_E_INPUT, "not on its stack"},
    {"string beyond the end", BYTES(PICKLE("X\xff\xff\xff\xff")), QT_E_INPUT,
     "middle of an instruction"},
    {"long string beyond the end", BYTES(PICKLE("\x8d\xff\xff\xff\xff\xff\xff\xff\xff")),
     QT_E_INPUT, "middle of an instruction"},
    {"a tensor alone", BYTES(PICKLE(PLAIN)), QT_E_UNSUPPORTED, "holds no state dict"},
    {"empty dict", BYTES(PICKLE("}")), QT_E_UNSUPPORTED, "holds no state dict"},
    {"dict in itself", BYTES(PICKLE("}q\0" STRING("\5", "model") "h\0s")), QT_E_UNSUPPORTED,
     "holds no state dict"},
    {"two state dicts",
     BYTES(PICKLE("}" STRING("\5", "model") "}" KEY PLAIN
                                            "ss" STRING("\n", "state_dict") "}" KEY PLAIN "ss")),
     QT_E_UNSUPPORTED, "more than one state dict"},
    {"number as key", BYTES(PICKLE("}K\1" PLAIN "s")), QT_E_INPUT, "a key that is not a string"},
    {"list beside tensors", BYTES(PICKLE("}(" KEY PLAIN STRING("\1", "l") "]K\1au")),
     QT_E_UNSUPPORTED, "tensor l: is not a tensor"},
    {"storage as value", BYTES(PICKLE("}(" KEY PLAIN STRING("\1", "l") STORAGE "u")),
     QT_E_UNSUPPORTED, "tensor l: is not a tensor"},
    {"tensor twice", BYTES(PICKLE("}(" KEY PLAIN KEY PLAIN "u")), QT_E_INPUT,
     "tensor w: is stored more than once"},
    {"empty name", BYTES(PICKLE("}" STRING("\0", "") PLAIN "s")), QT_E_INPUT, "empty name"},
    {"nul in name", BYTES(PICKLE("}" STRING("\2", "w\0") PLAIN "s")), QT_E_INPUT,
     "control character"},
    {"name not utf-8", BYTES(PICKLE("}" STRING("\2", "w\xff") PLAIN "s")), QT_E_INPUT, "not UTF-8"},
    {"beyond the storage", BYTES(PICKLE("}" KEY TENSOR("K\1", "K\2K\3\x86", "K\3K\1\x86") "s")),
     QT_E_INPUT, "tensor w: reaches element 6 of a storage of 6"},
    {"far stride", BYTES(PICKLE("}" KEY TENSOR("K\0", "K\2K\3\x86", "K\4K\1\x86") "s")), QT_E_INPUT,
     "reaches element 6 of a storage of 6"},
    {"stride overflow",
     BYTES(PICKLE("}" KEY TENSOR("K\0", "K\3K\2\x86",
                                 "\x8a\x08\0\0\0\0\0\0\0\x7f\x8a\x08\1\0\0\0\0\0\0\x7f\x86") "s")),
     QT_E_INPUT, "strides are too large"},
    {"offset overflow",
     BYTES(PICKLE("}" KEY TENSOR("\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f", "K\2K\3\x86",
                                 "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\1\x86") "s")),
     QT_E_INPUT, "strides are too large"},
    {"negative offset",
     BYTES(PICKLE("}" KEY TENSOR("J\xff\xff\xff\xff", "K\2K\3\x86", "K\3K\1\x86") "s")), QT_E_INPUT,
     "must not be negative"},
    {"negative stride", BYTES(PICKLE("}" KEY TENSOR("K\0", "K\2K\3\x86", "\x8a\1\xffK\1\x86") "s")),
     QT_E_INPUT, "must not be negative"},
    {"negative size",
     BYTES(PICKLE("}" KEY TENSOR("K\0", "J\xff\xff\xff\xffK\3\x86", "K\3K\1\x86") "s")), QT_E_INPUT,
     "must not be negative"},
    {"size a string", BYTES(PICKLE("}" KEY TENSOR("K\0", KEY "K\3\x86", "K\3K\1\x86") "s")),
     QT_E_INPUT, "must not be negative"},
    {"stride missing", BYTES(PICKLE("}" KEY TENSOR("K\0", "K\2K\3\x86", "K\1\x85") "s")),
     QT_E_INPUT, "tuples of one length"},
    {"size no tuple", BYTES(PICKLE("}" KEY TENSOR("K\0", "]", "]") "s")), QT_E_INPUT,
     "tuples of one length"},
    {"nine dims",
     BYTES(PICKLE("}" KEY TENSOR("K\0", "(K\1K\1K\1K\1K\1K\1K\1K\1K\1t",
                                 "(K\1K\1K\1K\1K\1K\1K\1K\1K\1t") "s")),
     QT_E_UNSUPPORTED, "more than 8 dimensions"},
    {"size overflow",
     BYTES(PICKLE(
         "}" KEY TENSOR("K\0", "\x8a\x06\0\0\0\0\0\1\x8a\x06\0\0\0\0\0\1\x86", "K\0K\0\x86") "s")),
     QT_E_INPUT, "shape is too large"},
    {"expanded", BYTES(PICKLE("}" KEY TENSOR("K\0", "J\0\0\0\x40K\1\x86", "K\0K\1\x86") "s")),
     QT_E_UNSUPPORTED, "expanded from a storage of 6"},
};

static void test_pickles(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof pickles / sizeof *pickles; i++) {
        struct archive a;
        struct qt_err err = {0};
        make_archive(&a, pickles[i].code, pickles[i].size);
        expect_error(pickles[i].name, open_archive(dir, &a, &err), pickles[i].status,
                     pickles[i].fragment, &err);
    }
    fixture_remove(dir);
}

/* Storages that are missing or differ from the stated one. */
static void test_storages(void **state)
{
    (void)state;
    static const struct {
        const char *name, *entry;
        size_t size;
        const char *fragment;
    } cases[] = {
        {"absent", "m/data/1", 24, "tensor w: storage '0' is not in the archive"},
        {"elsewhere", "data/0", 24, "tensor w: storage '0' is not in the archive"},
        {"short", "m/data/0", 20, "storage '0' has 20 bytes, but 6 elements of F32"},
        {"empty", "m/data/0", 0, "storage '0' has 0 bytes"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct archive a = {.size = 0};
        struct qt_err err = {0};
        add_entry(&a, "m/data.pkl", BYTES(GOOD));
        add_entry(&a, cases[i].entry, storage, cases[i].size);
        end_archive(&a);
        expect_error(cases[i].name, open_archive(dir, &a, &err), QT_E_INPUT, cases[i].fragment,
                     &err);
    }
    fixture_remove(dir);
}

static void test_members(void **state)
{
    (void)state;
    static const struct {
        const char *name, *entries[3];
        enum qt_status status;
        const char *fragment;
    } cases[] = {
        {"big endian",
         {"m/data.pkl", "m/data/0", "m/byteorder"},
         QT_E_UNSUPPORTED,
         "byte order 'big'"},
        {"no pickle", {"m/x.pkl", "m/data/0"}, QT_E_INPUT, "no data.pkl in the archive"},
        {"pickle without folder", {"data.pkl", "data/0"}, QT_E_INPUT, "no data.pkl"},
        {"pickle too deep", {"m/n/data.pkl", "m/n/data/0"}, QT_E_INPUT, "no data.pkl"},
        {"two pickles",
         {"m/data.pkl", "m/data/0", "n/data.pkl"},
         QT_E_INPUT,
         "more than one data.pkl"},
        {"one entry twice",
         {"m/data.pkl", "m/data/0", "m/data/0"},
         QT_E_INPUT,
         "zip entry 'm/data/0': occurs twice"},
        {"nothing", {NULL}, QT_E_INPUT, "no data.pkl"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct archive a = {.size = 0};
        struct qt_err err = {0};
        for (size_t j = 0; j < 3 && cases[i].entries[j]; j++) {
            const char *name = cases[i].entries[j];
            if (strstr(name, ".pkl"))
                add_entry(&a, name, BYTES(GOOD));
            else if (strstr(name, "byteorder"))
                add_entry(&a, name, "big", 3);
            else
                add_entry(&a, name, storage, sizeof storage);
        }
        end_archive(&a);
        expect_error(cases[i].name, open_archive(dir, &a, &err), cases[i].status, cases[i].fragment,
                     &err);
    }
    fixture_remove(dir);
}

/* Changes one field of a valid archive: `value` of `width` bytes at `offset` in the nth record that
 * starts with "PK" + sign. */
static const struct {
    const char *name, *sign;
    unsigned nth;
    size_t offset;
    uint64_t value;
    unsigned width;
    enum qt_status status;
    const char *fragment;
} patches[] = {
    {"no end record", "\5\6", 0, 0, 0, 4, QT_E_INPUT, "no end of central directory"},
    {"comment beyond the end", "\5\6", 0, 20, 1, 2, QT_E_INPUT, "no end of central directory"},
    {"disk number", "\5\6", 0, 4, 1, 2, QT_E_INPUT, "several disks"},
    {"entries on this disk", "\5\6", 0, 8, 1, 2, QT_E_INPUT, "several disks"},
    {"directory too long", "\5\6", 0, 12, 9999, 4, QT_E_INPUT,
     "central directory outside the file"},
    {"directory behind the end", "\5\6", 0, 16, 0xfffffff0, 4, QT_E_INPUT,
     "central directory outside the file"},
    {"directory elsewhere", "\5\6", 0, 16, 1, 4, QT_E_INPUT, "central directory is damaged"},
    {"too many entries", "\5\6", 0, 8, 0x40004000, 4, QT_E_INPUT, "more entries than"},
    {"too few entries", "\5\6", 0, 8, 0x00020002, 4, QT_E_INPUT, "more entries than stated"},
    {"no central header", "\1\2", 1, 0, 0, 4, QT_E_INPUT, "central directory is damaged"},
    {"encrypted", "\1\2", 2, 8, 1, 2, QT_E_INPUT, "zip entry 'm/data/0': encrypted"},
    {"strongly encrypted", "\1\2", 2, 8, 0x41, 2, QT_E_INPUT, "encrypted"},
    {"method bzip2", "\1\2", 2, 10, 12, 2, QT_E_UNSUPPORTED, "compression method 12"},
    {"crc of data", "\1\2", 2, 16, 1, 4, QT_E_INPUT, "zip entry 'm/data/0': checksum"},
    {"crc of the pickle", "\1\2", 0, 16, 1, 4, QT_E_INPUT, "zip entry 'm/data.pkl': checksum"},
    {"two sizes", "\1\2", 2, 24, 25, 4, QT_E_INPUT, "stored with two different sizes"},
    {"not deflated", "\1\2", 2, 10, 8, 2, QT_E_INPUT, "deflated data is damaged"},
    {"packed beyond the end", "\1\2", 2, 20, 0x0000ffff0000ffff, 8, QT_E_INPUT,
     "data outside the file"},
    {"zip64 without field", "\1\2", 2, 24, 0xffffffff, 4, QT_E_INPUT, "zip64 field missing"},
    {"name too long", "\1\2", 2, 28, 0xffff, 2, QT_E_INPUT, "central directory is damaged"},
    {"extra too long", "\1\2", 2, 30, 0xffff, 2, QT_E_INPUT, "central directory is damaged"},
    {"header behind the end", "\1\2", 2, 42, 0x7fffffff, 4, QT_E_INPUT, "header outside the file"},
    {"header elsewhere", "\1\2", 2, 42, 1, 4, QT_E_INPUT, "no local header"},
    {"another's header", "\1\2", 2, 42, 0, 4, QT_E_INPUT, "its local header has another name"},
    {"local name differs", "\3\4", 2, 30, 'x', 1, QT_E_INPUT, "its local header has another name"},
    {"local name shorter", "\3\4", 0, 26, 9, 2, QT_E_INPUT, "its local header has another name"},
    {"local extra too long", "\3\4", 2, 28, 0xffff, 2, QT_E_INPUT, "data outside the file"},
    {"local extra moves data", "\3\4", 2, 28, 1, 2, QT_E_INPUT, "data outside the file"},
    {"overlap", "\3\4", 1, 28, 1, 2, QT_E_INPUT, "zip entry 'm/data/0': overlaps another"},
    {"no local header", "\3\4", 0, 0, 0x04034b51, 4, QT_E_INPUT, "not a PyTorch checkpoint"},
};

static unsigned char *find_record(struct archive *a, const char *sign, unsigned nth)
{
    for (size_t i = 0; i + 4 <= a->size; i++)
        if (a->bytes[i] == 'P' && a->bytes[i + 1] == 'K' && memcmp(a->bytes + i + 2, sign, 2) == 0)
            if (nth-- == 0)
                return a->bytes + i;
    fail_msg("no such record");
    return NULL;
}

static void test_archives(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof patches / sizeof *patches; i++) {
        struct archive a;
        struct qt_err err = {0};
        make_archive(&a, BYTES(GOOD));
        put(find_record(&a, patches[i].sign, patches[i].nth) + patches[i].offset, patches[i].value,
            patches[i].width);
        expect_error(patches[i].name, open_archive(dir, &a, &err), patches[i].status,
                     patches[i].fragment, &err);
    }
    fixture_remove(dir);
}

/* The end records of a file by torch.save, which always writes zip64 records. */
static void test_zip64_end(void **state)
{
    (void)state;
    static const struct {
        const char *name, *sign;
        size_t offset;
        uint64_t value;
        unsigned width;
        const char *fragment;
    } cases[] = {
        {"locator behind the end", "\6\7", 8, UINT64_MAX - 8, 8, "zip64 end record outside"},
        {"locator elsewhere", "\6\7", 8, 5, 8, "no zip64 end record where the locator points"},
        {"locator's disk", "\6\7", 4, 1, 4, "several disks"},
        {"disk", "\6\6", 16, 1, 4, "several disks"},
        {"count on this disk", "\6\6", 24, 1, 8, "several disks"},
        {"directory size", "\6\6", 40, UINT64_MAX, 8, "central directory outside the file"},
        {"directory offset", "\6\6", 48, UINT64_MAX - 100, 8, "central directory outside the file"},
    };
    char *dir = fixture_dir(), *data;
    struct archive a;
    struct qt_err err = {0};
    size_t size;
    expect_ok("read", qt_file_read(&data, &size, GOLDEN("plain.bin"), sizeof a.bytes, &err), &err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(a.bytes, data, size);
        a.size = size;
        put(find_record(&a, cases[i].sign, 0) + cases[i].offset, cases[i].value, cases[i].width);
        expect_error(cases[i].name, open_archive(dir, &a, &err), QT_E_INPUT, cases[i].fragment,
                     &err);
    }
    qt_free(data);
    fixture_remove(dir);
}

/* Sizes and offset of the storage in a zip64 extra field. */
static void test_zip64_extra(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        unsigned id, stated;
        uint64_t size;
        enum qt_status status;
        const char *fragment;
    } cases[] = {
        {"good", 1, 24, 24, QT_OK, ""},
        {"unknown id", 2, 24, 24, QT_E_INPUT, "zip64 field missing"},
        {"too short", 1, 16, 24, QT_E_INPUT, "zip64 field too short"},
        {"too long", 1, 25, 24, QT_E_INPUT, "extra field beyond its end"},
        {"huge", 1, 24, UINT64_MAX - 3, QT_E_INPUT, "data outside the file"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct archive a = {.size = 0};
        struct qt_err err = {0};
        add_entry(&a, "m/data.pkl", BYTES(GOOD));
        size_t offset = a.size;
        unsigned char *central = a.directory + a.directory_size;
        add_entry(&a, "m/data/0", storage, sizeof storage);
        unsigned char *extra = a.directory + a.directory_size;
        put(central + 20, UINT64_MAX, 8);
        put(central + 30, 28, 2);
        put(central + 42, UINT32_MAX, 4);
        put(extra, cases[i].id, 2);
        put(extra + 2, cases[i].stated, 2);
        put(extra + 4, cases[i].size, 8);
        put(extra + 12, cases[i].size, 8);
        put(extra + 20, offset, 8);
        a.directory_size += 28;
        end_archive(&a);
        expect_error(cases[i].name, open_archive(dir, &a, &err), cases[i].status, cases[i].fragment,
                     &err);
    }
    fixture_remove(dir);
}

/* A size that deflate cannot produce from the packed bytes is rejected before allocating. */
static void test_bomb(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct archive a;
    struct qt_err err = {0};
    make_archive(&a, BYTES(GOOD));
    unsigned char *central = find_record(&a, "\1\2", 2);
    put(central + 10, 8, 2);
    put(central + 24, 0xfffffffe, 4);
    expect_error("bomb", open_archive(dir, &a, &err), QT_E_INPUT, "more than deflate can express",
                 &err);

    /* An entry whose size is wrong is not inflated. */
    a = (struct archive){.size = 0};
    add_entry(&a, "m/data.pkl", BYTES(GOOD));
    add_entry(&a, "m/data/0", storage, sizeof storage);
    add_entry(&a, "m/byteorder", storage, sizeof storage);
    end_archive(&a);
    put(find_record(&a, "\1\2", 2) + 10, 8, 2);
    expect_error("byte order", open_archive(dir, &a, &err), QT_E_UNSUPPORTED,
                 "byteorder has 24 bytes, but at most 20 are allowed", &err);
    fixture_remove(dir);
}

/* Errors of inflating and of gathering a view name the tensor. */
static void test_no_memory(void **state)
{
    (void)state;
    static const struct {
        const char *path, *tensor;
    } cases[] = {{GOLDEN("deflated.bin"), "w"}, {GOLDEN("transposed.pth"), "t"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_ckpt *ckpt = open_ok(cases[i].path);
        struct qt_err err = {0};
        struct qt_blob blob;
        qt_mem_fail_after(0);
        int rc = qt_ckpt_read(&blob, ckpt, qt_ckpt_find(ckpt, cases[i].tensor), &err);
        qt_mem_fail_after(-1);
        expect_error(cases[i].path, rc, QT_E_RESOURCE, "out of memory", &err);
        assert_string_equal(err.file, cases[i].path);
        assert_string_equal(err.tensor, cases[i].tensor);
        qt_ckpt_close(ckpt);
    }
}

/* Every prefix of a real file, and every changed byte, gives an error or a clean read. */
static void test_damage(void **state)
{
    (void)state;
    static const char *const files[] = {GOLDEN("plain.bin"), GOLDEN("deflated.bin")};
    char *dir = fixture_dir();
    for (size_t f = 0; f < 2; f++) {
        struct archive a = {.size = 0};
        struct qt_err err = {0};
        char *data;
        expect_ok(files[f], qt_file_read(&data, &a.size, files[f], sizeof a.bytes, &err), &err);
        memcpy(a.bytes, data, a.size);
        qt_free(data);
        const size_t size = a.size;
        for (a.size = 0; a.size < size; a.size += 7)
            assert_true(open_archive(dir, &a, &err) < 0);
        a.size = size;
        for (size_t i = 0; i < size; i += 3) {
            unsigned char old = a.bytes[i];
            a.bytes[i] ^= (unsigned char)(1 + i % 255);
            int rc = open_archive(dir, &a, &err);
            assert_true(rc == QT_OK || rc == QT_E_INPUT || rc == QT_E_UNSUPPORTED);
            a.bytes[i] = old;
        }
        expect_ok("restored", open_archive(dir, &a, &err), &err);
    }
    fixture_remove(dir);
}

static void test_other_files(void **state)
{
    (void)state;
    static const struct {
        const char *name, *bytes;
        size_t size;
        enum qt_status status;
        const char *fragment;
    } cases[] = {
        {"empty", BYTES(""), QT_E_INPUT, "the file is empty"},
        {"text", BYTES("hello world"), QT_E_INPUT, "not a PyTorch checkpoint, but plain text"},
        {"PK only", BYTES("PK\3\4"), QT_E_INPUT, "no end of central directory"},
        {"pickle", BYTES("\x80\2}."), QT_E_UNSUPPORTED, "PyTorch before 1.6"},
    };
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_err err = {0};
        struct qt_ckpt *ckpt;
        const char *path = fixture_write(dir, "m.bin", cases[i].bytes, cases[i].size);
        expect_error(cases[i].name, qt_ckpt_open(&ckpt, path, &err), cases[i].status,
                     cases[i].fragment, &err);
    }
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),       cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_untyped),     cmocka_unit_test(test_views),
        cmocka_unit_test(test_shared),      cmocka_unit_test(test_checked_once),
        cmocka_unit_test(test_modules),     cmocka_unit_test(test_sharded),
        cmocka_unit_test(test_refused),     cmocka_unit_test(test_pickles),
        cmocka_unit_test(test_storages),    cmocka_unit_test(test_members),
        cmocka_unit_test(test_archives),    cmocka_unit_test(test_bomb),
        cmocka_unit_test(test_zip64_end),   cmocka_unit_test(test_zip64_extra),
        cmocka_unit_test(test_no_memory),   cmocka_unit_test(test_damage),
        cmocka_unit_test(test_other_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
