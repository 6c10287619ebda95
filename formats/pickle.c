/*
 * A restricted unpickler that can only describe tensors.
 *
 * A pickle is a program for a stack machine (Python's pickletools.py documents every opcode). This
 * machine implements the opcodes that torch.save emits for state dicts, pickle protocols 2 to 5. It
 * accepts only the classes and functions ("globals") of the table below; "calling" one of them
 * builds a node. It never executes code.
 */
#include "formats/pickle.h"

enum { MAX_NODES = 1 << 24, MAX_STACK = 1 << 20 };

enum { MARK_NODE = 0 }; /* the node of all marks */

enum global {
    ORDERED_DICT,
    REBUILD_TENSOR,       /* storage of a type: _rebuild_tensor_v2 */
    REBUILD_TENSOR_DTYPE, /* storage of bytes and a dtype: _rebuild_tensor_v3 */
    REBUILD_PARAMETER,
    STORAGE_TYPE, /* dtype QT_DTYPE_COUNT: bytes */
    DTYPE,
};

static const struct {
    const char *module, *name;
    enum global which;
    enum qt_dtype dtype;
} globals[] = {
    {"collections", "OrderedDict", ORDERED_DICT, QT_DTYPE_COUNT},
    {"torch._utils", "_rebuild_tensor_v2", REBUILD_TENSOR, QT_DTYPE_COUNT},
    {"torch._utils", "_rebuild_tensor_v3", REBUILD_TENSOR_DTYPE, QT_DTYPE_COUNT},
    {"torch._utils", "_rebuild_parameter", REBUILD_PARAMETER, QT_DTYPE_COUNT},
    {"torch._utils", "_rebuild_parameter_with_state", REBUILD_PARAMETER, QT_DTYPE_COUNT},
    {"torch", "BoolStorage", STORAGE_TYPE, QT_BOOL},
    {"torch", "ByteStorage", STORAGE_TYPE, QT_U8},
    {"torch", "CharStorage", STORAGE_TYPE, QT_I8},
    {"torch", "ShortStorage", STORAGE_TYPE, QT_I16},
    {"torch", "HalfStorage", STORAGE_TYPE, QT_F16},
    {"torch", "BFloat16Storage", STORAGE_TYPE, QT_BF16},
    {"torch", "IntStorage", STORAGE_TYPE, QT_I32},
    {"torch", "FloatStorage", STORAGE_TYPE, QT_F32},
    {"torch", "ComplexFloatStorage", STORAGE_TYPE, QT_C64},
    {"torch", "DoubleStorage", STORAGE_TYPE, QT_F64},
    {"torch", "LongStorage", STORAGE_TYPE, QT_I64},
    {"torch", "UntypedStorage", STORAGE_TYPE, QT_DTYPE_COUNT},
    {"torch.storage", "UntypedStorage", STORAGE_TYPE, QT_DTYPE_COUNT},
    {"torch", "bool", DTYPE, QT_BOOL},
    {"torch", "uint8", DTYPE, QT_U8},
    {"torch", "int8", DTYPE, QT_I8},
    {"torch", "uint16", DTYPE, QT_U16},
    {"torch", "int16", DTYPE, QT_I16},
    {"torch", "uint32", DTYPE, QT_U32},
    {"torch", "int32", DTYPE, QT_I32},
    {"torch", "uint64", DTYPE, QT_U64},
    {"torch", "int64", DTYPE, QT_I64},
    {"torch", "float8_e4m3fn", DTYPE, QT_F8_E4M3},
    {"torch", "float8_e5m2", DTYPE, QT_F8_E5M2},
    {"torch", "float8_e8m0fnu", DTYPE, QT_F8_E8M0},
    {"torch", "float8_e4m3fnuz", DTYPE, QT_F8_E4M3FNUZ},
    {"torch", "float8_e5m2fnuz", DTYPE, QT_F8_E5M2FNUZ},
    {"torch", "float16", DTYPE, QT_F16},
    {"torch", "bfloat16", DTYPE, QT_BF16},
    {"torch", "float32", DTYPE, QT_F32},
    {"torch", "float64", DTYPE, QT_F64},
    {"torch", "complex64", DTYPE, QT_C64},
};

struct machine {
    const unsigned char *at, *end;
    struct pickle values;
    size_t node_count, node_room, cell_count, cell_room;
    uint32_t *stack, *memo; /* indices of nodes */
    size_t depth, stack_room, memo_count, memo_room;
    const char *file;
    struct qt_err *err;
};

static int bad(const struct machine *m, const char *what)
{
    return qt_fail(m->err, QT_E_INPUT, m->file, NULL, "pickle: %s", what);
}

static int underflow(const struct machine *m)
{
    return bad(m, "takes a value that is not on its stack");
}

/* ---- stack, nodes, members ------------------------------------------------------------------ */

static int push(struct machine *m, uint32_t node)
{
    if (m->depth == MAX_STACK)
        return bad(m, "stack too deep");
    int rc = qt_array_grow(&m->stack, &m->stack_room, m->depth + 1, sizeof *m->stack, m->err);
    if (rc == QT_OK)
        m->stack[m->depth++] = node;
    return rc;
}

static int push_new(struct machine *m, struct pickle_node node)
{
    if (m->node_count == MAX_NODES)
        return bad(m, "too many objects");
    int rc = qt_array_grow(&m->values.nodes, &m->node_room, m->node_count + 1, sizeof node, m->err);
    if (rc < 0)
        return rc;
    m->values.nodes[m->node_count] = node;
    return push(m, (uint32_t)m->node_count++);
}

static int push_kind(struct machine *m, enum pickle_kind kind)
{
    return push_new(m, (struct pickle_node){.kind = kind});
}

static struct pickle_node *top(struct machine *m)
{
    uint32_t node = m->depth ? m->stack[m->depth - 1] : MARK_NODE;
    return node == MARK_NODE ? NULL : &m->values.nodes[node];
}

static int pop(struct machine *m, uint32_t *out)
{
    if (!top(m))
        return underflow(m);
    *out = m->stack[--m->depth];
    return QT_OK;
}

/* Stack index of the first value above the topmost mark. */
static int find_mark(const struct machine *m, size_t *out)
{
    for (size_t i = m->depth; i > 0; i--)
        if (m->stack[i - 1] == MARK_NODE) {
            *out = i;
            return QT_OK;
        }
    return bad(m, "a mark is missing");
}

static int append(struct machine *m, uint32_t container, uint32_t member)
{
    if (m->cell_count == MAX_NODES)
        return bad(m, "too many members");
    int rc = qt_array_grow(&m->values.cells, &m->cell_room, m->cell_count + 1,
                           sizeof *m->values.cells, m->err);
    if (rc < 0)
        return rc;
    uint32_t cell = (uint32_t)m->cell_count++;
    struct pickle_node *c = &m->values.nodes[container];
    m->values.cells[cell] = (struct pickle_cell){member, 0};
    if (c->count++)
        m->values.cells[c->last].next = cell;
    else
        c->first = cell;
    c->last = cell;
    return QT_OK;
}

/* Moves the values from stack index `from` up into `container`. */
static int append_from(struct machine *m, uint32_t container, size_t from)
{
    int rc = QT_OK;
    for (size_t i = from; rc == QT_OK && i < m->depth; i++)
        rc = m->stack[i] == MARK_NODE ? underflow(m) : append(m, container, m->stack[i]);
    m->depth = from;
    return rc;
}

/* Moves the values from stack index `from` up into a new container. */
static int push_container(struct machine *m, enum pickle_kind kind, size_t from)
{
    int rc = push_kind(m, kind);
    if (rc < 0)
        return rc;
    uint32_t container = m->stack[--m->depth];
    rc = append_from(m, container, from);
    return rc < 0 ? rc : push(m, container);
}

/* ---- bytes of the program ------------------------------------------------------------------- */

static int take(struct machine *m, const unsigned char **out, uint64_t n)
{
    if (n > (uint64_t)(m->end - m->at))
        return bad(m, "ends in the middle of an instruction");
    *out = m->at;
    m->at += n;
    return QT_OK;
}

/* Takes a little-endian number of n <= 8 bytes. */
static int take_number(struct machine *m, uint64_t *out, unsigned n)
{
    const unsigned char *p = NULL;
    int rc = take(m, &p, n);
    *out = 0;
    for (unsigned i = 0; rc == QT_OK && i < n; i++)
        *out |= (uint64_t)p[i] << 8 * i;
    return rc;
}

static int take_line(struct machine *m, const unsigned char **out, size_t *size)
{
    const unsigned char *newline = memchr(m->at, '\n', (size_t)(m->end - m->at));
    if (!newline)
        return bad(m, "ends in the middle of an instruction");
    *out = m->at;
    *size = (size_t)(newline - m->at);
    m->at = newline + 1;
    return QT_OK;
}

/* Pushes a value of `kind`: a length of `width` bytes, then that many bytes. */
static int push_text(struct machine *m, enum pickle_kind kind, unsigned width)
{
    uint64_t n;
    const unsigned char *p = NULL;
    int rc = take_number(m, &n, width);
    if (rc == QT_OK)
        rc = take(m, &p, n);
    return rc < 0
               ? rc
               : push_new(m, (struct pickle_node){.kind = kind, .number = (int64_t)n, .text = p});
}

/* ---- instructions: values ------------------------------------------------------------------- */

static int op_string(struct machine *m, unsigned width)
{
    return push_text(m, STRING, width);
}

static int op_bytes(struct machine *m, unsigned width)
{
    return push_text(m, OTHER, width);
}

static int op_int(struct machine *m, unsigned width)
{
    uint64_t n;
    int rc = take_number(m, &n, width);
    int64_t value = width == 4 ? (int32_t)n : (int64_t)n; /* only the 4-byte form is signed */
    return rc < 0 ? rc : push_new(m, (struct pickle_node){.kind = INT, .number = value});
}

/* Two's complement number of any length. */
static int op_long(struct machine *m, unsigned width)
{
    uint64_t n, value = 0;
    const unsigned char *p = NULL;
    int rc = take_number(m, &n, width);
    if (rc == QT_OK)
        rc = take(m, &p, n);
    if (rc < 0)
        return rc;
    if (n > 8)
        return push_kind(m, OTHER);
    for (unsigned i = 0; i < n; i++)
        value |= (uint64_t)p[i] << 8 * i;
    if (n > 0 && n < 8 && p[n - 1] & 0x80)
        value |= UINT64_MAX << 8 * n;
    return push_new(m, (struct pickle_node){.kind = INT, .number = (int64_t)value});
}

/* Pushes a value of n bytes that is not needed. */
static int op_other(struct machine *m, unsigned n)
{
    const unsigned char *p = NULL;
    int rc = take(m, &p, n);
    return rc < 0 ? rc : push_kind(m, OTHER);
}

/* Frames matter to readers of streams only. */
static int op_frame(struct machine *m, unsigned width)
{
    uint64_t n;
    return take_number(m, &n, width);
}

/* ---- instructions: stack, containers, memo -------------------------------------------------- */

static int op_mark(struct machine *m, unsigned unused)
{
    (void)unused;
    return push(m, MARK_NODE);
}

static int op_pop(struct machine *m, unsigned unused)
{
    (void)unused;
    uint32_t ignored;
    return pop(m, &ignored);
}

static int op_pop_mark(struct machine *m, unsigned unused)
{
    (void)unused;
    size_t from = 0;
    int rc = find_mark(m, &from);
    if (rc == QT_OK)
        m->depth = from - 1;
    return rc;
}

static int op_empty(struct machine *m, unsigned kind)
{
    return push_kind(m, (enum pickle_kind)kind);
}

static int op_tuple_n(struct machine *m, unsigned n)
{
    return m->depth < n ? underflow(m) : push_container(m, TUPLE, m->depth - n);
}

static int op_tuple(struct machine *m, unsigned unused)
{
    (void)unused;
    size_t from = 0;
    int rc = find_mark(m, &from);
    if (rc == QT_OK)
        rc = push_container(m, TUPLE, from);
    if (rc < 0)
        return rc;
    m->stack[m->depth - 2] = m->stack[m->depth - 1]; /* overwrites the mark */
    m->depth--;
    return QT_OK;
}

/* Moves the values from stack index `from` up into the container at stack index `below` - 1. */
static int extend(struct machine *m, enum pickle_kind kind, size_t from, size_t below)
{
    if (below == 0 || m->values.nodes[m->stack[below - 1]].kind != kind)
        return bad(m, kind == DICT ? "sets items of a value that is not a dict"
                                   : "appends to a value that is not a list");
    if (kind == DICT && (m->depth - from) % 2)
        return bad(m, "a dict item has no value");
    int rc = append_from(m, m->stack[below - 1], from);
    m->depth = below;
    return rc;
}

static int op_extend_marked(struct machine *m, unsigned kind)
{
    size_t from = 0;
    int rc = find_mark(m, &from);
    return rc < 0 ? rc : extend(m, (enum pickle_kind)kind, from, from - 1);
}

static int op_extend_one(struct machine *m, unsigned kind)
{
    size_t n = kind == DICT ? 2 : 1;
    return m->depth <= n ? underflow(m)
                         : extend(m, (enum pickle_kind)kind, m->depth - n, m->depth - n);
}

/* Picklers number memo entries consecutively; gaps are rejected, as they would waste memory. */
static int memo_set(struct machine *m, uint64_t i)
{
    if (!top(m))
        return underflow(m);
    if (i > m->memo_count || i >= MAX_NODES)
        return bad(m, "memo entries out of order");
    int rc = qt_array_grow(&m->memo, &m->memo_room, i + 1, sizeof *m->memo, m->err);
    if (rc < 0)
        return rc;
    m->memo[i] = m->stack[m->depth - 1];
    m->memo_count += i == m->memo_count;
    return QT_OK;
}

static int op_memoize(struct machine *m, unsigned unused)
{
    (void)unused;
    return memo_set(m, m->memo_count);
}

static int op_put(struct machine *m, unsigned width)
{
    uint64_t i;
    int rc = take_number(m, &i, width);
    return rc < 0 ? rc : memo_set(m, i);
}

static int op_get(struct machine *m, unsigned width)
{
    uint64_t i;
    int rc = take_number(m, &i, width);
    if (rc < 0)
        return rc;
    return i < m->memo_count ? push(m, m->memo[i]) : bad(m, "reads a memo entry that is not set");
}

/* ---- instructions: globals and calls -------------------------------------------------------- */

static bool text_is(const char *s, const unsigned char *text, size_t size)
{
    return strlen(s) == size && memcmp(s, text, size) == 0;
}

static bool text_starts(const char *s, const unsigned char *text, size_t size)
{
    return size >= strlen(s) && memcmp(text, s, strlen(s)) == 0;
}

/* True for dtypes that are not in the table: torch.float4_e2m1fn_x2, torch.complex128. */
static bool is_torch_dtype(const unsigned char *module, size_t module_size,
                           const unsigned char *name, size_t name_size)
{
    static const char *const starts[] = {"float",   "bfloat", "int",   "uint",
                                         "complex", "qint",   "quint", "bits"};
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
        if (text_is("torch", module, module_size) && text_starts(starts[i], name, name_size))
            return true;
    return false;
}

/* True for tensors that are not in the table: sparse, quantized, with a storage of complex128. */
static bool is_torch_tensor(const unsigned char *module, size_t module_size,
                            const unsigned char *name, size_t name_size)
{
    const size_t end = strlen("Storage");
    return (text_is("torch._utils", module, module_size) &&
            text_starts("_rebuild_", name, name_size)) ||
           (text_is("torch", module, module_size) && name_size > end &&
            text_is("Storage", name + name_size - end, end));
}

static int push_global(struct machine *m, const unsigned char *module, size_t module_size,
                       const unsigned char *name, size_t name_size)
{
    for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
        if (text_is(globals[i].module, module, module_size) &&
            text_is(globals[i].name, name, name_size))
            return push_new(m, (struct pickle_node){.kind = GLOBAL,
                                                    .number = globals[i].which,
                                                    .dtype = globals[i].dtype});
    const bool dtype = is_torch_dtype(module, module_size, name, name_size);
    const bool tensor = dtype || is_torch_tensor(module, module_size, name, name_size);
    return qt_fail(m->err, tensor ? QT_E_UNSUPPORTED : QT_E_INPUT, m->file, NULL,
                   "pickle refers to %.*s.%.*s: %s", (int)qt_min_size(module_size, 100),
                   (const char *)module, (int)qt_min_size(name_size, 100), (const char *)name,
                   dtype    ? "tensors of this dtype are not supported"
                   : tensor ? "tensors of this kind are not supported"
                            : "only tensors are allowed");
}

static int op_global(struct machine *m, unsigned unused)
{
    (void)unused;
    const unsigned char *module = NULL, *name = NULL;
    size_t module_size = 0, name_size = 0;
    int rc = take_line(m, &module, &module_size);
    if (rc == QT_OK)
        rc = take_line(m, &name, &name_size);
    return rc < 0 ? rc : push_global(m, module, module_size, name, name_size);
}

static int op_stack_global(struct machine *m, unsigned unused)
{
    (void)unused;
    uint32_t name = 0, module = 0;
    int rc = pop(m, &name);
    if (rc == QT_OK)
        rc = pop(m, &module);
    if (rc < 0)
        return rc;
    const struct pickle_node *a = &m->values.nodes[module], *b = &m->values.nodes[name];
    if (a->kind != STRING || b->kind != STRING)
        return bad(m, "the name of a global is not a string");
    return push_global(m, a->text, (size_t)a->number, b->text, (size_t)b->number);
}

/* ('storage', type, key, location, elements) */
static int op_persistent_id(struct machine *m, unsigned unused)
{
    (void)unused;
    uint32_t i = 0;
    int rc = pop(m, &i);
    if (rc < 0)
        return rc;
    struct pickle_node id = m->values.nodes[i];
    if (id.kind != TUPLE || id.count != 5)
        return bad(m, "a persistent id is not a storage");
    const struct pickle_node *type = qt_pickle_member(&m->values, &id, 1);
    if (!qt_pickle_is_string(qt_pickle_member(&m->values, &id, 0), "storage") ||
        type->kind != GLOBAL || type->number != STORAGE_TYPE ||
        !qt_pickle_is(qt_pickle_member(&m->values, &id, 2), STRING) ||
        !qt_pickle_is(qt_pickle_member(&m->values, &id, 4), INT))
        return bad(m, "a persistent id is not a storage");
    id.kind = STORAGE;
    id.dtype = type->dtype;
    return push_new(m, id);
}

static int op_reduce(struct machine *m, unsigned unused)
{
    (void)unused;
    uint32_t i = 0, callee = 0;
    int rc = pop(m, &i);
    if (rc == QT_OK)
        rc = pop(m, &callee);
    if (rc < 0)
        return rc;
    struct pickle_node args = m->values.nodes[i];
    const struct pickle_node *f = &m->values.nodes[callee];
    const struct pickle_node *first = qt_pickle_member(&m->values, &args, 0);
    const struct pickle_node *dtype;
    if (f->kind != GLOBAL || f->number == STORAGE_TYPE || f->number == DTYPE || args.kind != TUPLE)
        return bad(m, "calls a value that is not a function");
    switch (f->number) {
    case ORDERED_DICT:
        return args.count ? bad(m, "OrderedDict with arguments") : push_kind(m, DICT);
    case REBUILD_TENSOR:
        if (args.count < 6 || args.count > 7 || !qt_pickle_is(first, STORAGE) ||
            first->dtype == QT_DTYPE_COUNT)
            return bad(m, "_rebuild_tensor_v2 with unexpected arguments");
        args.kind = TENSOR;
        args.dtype = first->dtype;
        return push_new(m, args);
    case REBUILD_TENSOR_DTYPE:
        dtype = qt_pickle_member(&m->values, &args, 6);
        if (args.count < 7 || args.count > 8 || !qt_pickle_is(first, STORAGE) ||
            first->dtype != QT_DTYPE_COUNT || !qt_pickle_is(dtype, GLOBAL) ||
            dtype->number != DTYPE)
            return bad(m, "_rebuild_tensor_v3 with unexpected arguments");
        args.kind = TENSOR;
        args.dtype = dtype->dtype;
        return push_new(m, args);
    default: /* REBUILD_PARAMETER: a parameter is its tensor; attributes are ignored */
        if (!qt_pickle_is(first, TENSOR))
            return bad(m, "_rebuild_parameter with unexpected arguments");
        return push(m, m->values.cells[args.first].node);
    }
}

/* Ignores the attributes of a state dict (its _metadata). */
static int op_build(struct machine *m, unsigned unused)
{
    (void)unused;
    uint32_t state = 0;
    int rc = pop(m, &state);
    if (rc < 0)
        return rc;
    return qt_pickle_is(top(m), DICT) ? QT_OK
                                      : bad(m, "sets the state of a value that is not a dict");
}

/* ---- the program ---------------------------------------------------------------------------- */

static const struct {
    int (*run)(struct machine *m, unsigned argument);
    unsigned argument;
} instructions[256] = {
    ['('] = {op_mark, 0},
    ['0'] = {op_pop, 0},
    ['1'] = {op_pop_mark, 0},
    ['N'] = {op_other, 0},   /* NONE */
    [0x88] = {op_other, 0},  /* NEWTRUE */
    [0x89] = {op_other, 0},  /* NEWFALSE */
    ['G'] = {op_other, 8},   /* BINFLOAT */
    ['J'] = {op_int, 4},     /* BININT */
    ['K'] = {op_int, 1},     /* BININT1 */
    ['M'] = {op_int, 2},     /* BININT2 */
    [0x8a] = {op_long, 1},   /* LONG1 */
    [0x8b] = {op_long, 4},   /* LONG4 */
    ['U'] = {op_string, 1},  /* SHORT_BINSTRING */
    ['T'] = {op_string, 4},  /* BINSTRING */
    [0x8c] = {op_string, 1}, /* SHORT_BINUNICODE */
    ['X'] = {op_string, 4},  /* BINUNICODE */
    [0x8d] = {op_string, 8}, /* BINUNICODE8 */
    ['C'] = {op_bytes, 1},   /* SHORT_BINBYTES */
    ['B'] = {op_bytes, 4},   /* BINBYTES */
    [0x8e] = {op_bytes, 8},  /* BINBYTES8 */
    [')'] = {op_empty, TUPLE},
    [']'] = {op_empty, LIST},
    ['}'] = {op_empty, DICT},
    [0x85] = {op_tuple_n, 1}, /* TUPLE1 */
    [0x86] = {op_tuple_n, 2}, /* TUPLE2 */
    [0x87] = {op_tuple_n, 3}, /* TUPLE3 */
    ['t'] = {op_tuple, 0},
    ['a'] = {op_extend_one, LIST},    /* APPEND */
    ['e'] = {op_extend_marked, LIST}, /* APPENDS */
    ['s'] = {op_extend_one, DICT},    /* SETITEM */
    ['u'] = {op_extend_marked, DICT}, /* SETITEMS */
    ['q'] = {op_put, 1},              /* BINPUT */
    ['r'] = {op_put, 4},              /* LONG_BINPUT */
    [0x94] = {op_memoize, 0},
    ['h'] = {op_get, 1}, /* BINGET */
    ['j'] = {op_get, 4}, /* LONG_BINGET */
    [0x95] = {op_frame, 8},
    ['c'] = {op_global, 0},
    [0x93] = {op_stack_global, 0},
    ['Q'] = {op_persistent_id, 0},
    ['R'] = {op_reduce, 0},
    ['b'] = {op_build, 0},
};

static int step(struct machine *m)
{
    unsigned char op = *m->at++;
    if (!instructions[op].run)
        return qt_fail(m->err, QT_E_INPUT, m->file, NULL,
                       "pickle: instruction 0x%02x is not used for tensors", op);
    return instructions[op].run(m, instructions[op].argument);
}

/* Runs the program, which must leave exactly one value on the stack. */
static int run(struct machine *m)
{
    enum { PROTO = 0x80, STOP = '.' };
    if (m->end - m->at < 2 || m->at[0] != PROTO)
        return bad(m, "does not start with a PROTO instruction");
    if (m->at[1] < 2 || m->at[1] > 5)
        return qt_fail(m->err, QT_E_UNSUPPORTED, m->file, NULL,
                       "pickle protocol %d, but 2 to 5 are supported", m->at[1]);
    m->at += 2;
    while (m->at < m->end && *m->at != STOP) {
        int rc = step(m);
        if (rc < 0)
            return rc;
    }
    if (m->at == m->end)
        return bad(m, "ends without a STOP instruction");
    if (m->at + 1 != m->end)
        return bad(m, "has bytes after its STOP instruction");
    if (m->depth != 1)
        return bad(m, "does not leave exactly one value");
    return pop(m, &m->values.root);
}

int qt_pickle_open(struct pickle *out, const unsigned char *data, size_t size, const char *file,
                   struct qt_err *err)
{
    int rc;
    struct machine m = {.at = data, .end = data + size, .file = file, .err = err};
    /* Index 0 is reserved in both arrays: for the mark, and for the end of a member list. */
    QT_TRY(qt_array_grow(&m.values.nodes, &m.node_room, 1, sizeof *m.values.nodes, err));
    QT_TRY(qt_array_grow(&m.values.cells, &m.cell_room, 1, sizeof *m.values.cells, err));
    m.values.nodes[m.node_count++] = (struct pickle_node){.kind = MARK};
    m.values.cells[m.cell_count++] = (struct pickle_cell){0};
    QT_TRY(run(&m));
done:
    qt_free(m.stack);
    qt_free(m.memo);
    *out = m.values;
    if (rc < 0)
        qt_pickle_close(out);
    return rc;
}

void qt_pickle_close(struct pickle *pickle)
{
    qt_free(pickle->nodes);
    qt_free(pickle->cells);
    *pickle = (struct pickle){0};
}

const struct pickle_node *qt_pickle_member(const struct pickle *p,
                                           const struct pickle_node *container, unsigned i)
{
    uint32_t cell = container->first;
    while (i-- && cell)
        cell = p->cells[cell].next;
    return cell ? &p->nodes[p->cells[cell].node] : NULL;
}

bool qt_pickle_is(const struct pickle_node *node, enum pickle_kind kind)
{
    return node && node->kind == kind;
}

bool qt_pickle_is_string(const struct pickle_node *node, const char *s)
{
    return qt_pickle_is(node, STRING) && text_is(s, node->text, (size_t)node->number);
}
