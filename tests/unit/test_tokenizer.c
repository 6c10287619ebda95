/* JSON in this file has ' for "; a literal apostrophe is \u0027. Expected ids: derived by hand. */
#include "calib/calib.h"
#include "model/tokenizer/internal.h"
#include "tests/unit/fixture.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

static void write_json(const char *dir, const char *name, const char *json)
{
    char *copy = strdup(json);
    assert_non_null(copy);
    for (char *p = copy; *p; p++)
        if (*p == '\'')
            *p = '"';
    fixture_write(dir, name, copy, strlen(copy));
    free(copy);
}

static int open_json(struct qt_tokenizer **tok, const char *dir, const char *json,
                     struct qt_err *err)
{
    write_json(dir, "tokenizer.json", json);
    return qt_tokenizer_open(tok, dir, err);
}

/* Ids as "1 2 3", or the error's text. */
static const char *encoded(const struct qt_tokenizer *tok, const char *text, size_t size,
                           bool special)
{
    static char out[4096];
    struct qt_err err = {0};
    uint32_t *ids;
    size_t count, at = 0;
    out[0] = '\0';
    if (qt_tokenizer_encode(&ids, &count, tok, text, size, special, &err) < 0) {
        qt_err_format(out, sizeof out, &err);
        return out;
    }
    for (size_t i = 0; i < count && at < sizeof out - 16; i++)
        at += (size_t)snprintf(out + at, sizeof out - at, i ? " %u" : "%u", ids[i]);
    qt_free(ids);
    return out;
}

#define TOKENIZER(added, norm, pre, post, model)                                                   \
    "{'added_tokens':[" added "],'normalizer':" norm ",'pre_tokenizer':" pre                       \
    ",'post_processor':" post ",'model':{" model "}}"
#define PLAIN(model)          TOKENIZER("", "null", "null", "null", model)
#define NORMALIZED(norm)      TOKENIZER("", norm, "null", "null", ASCII)
#define SPLIT(pre)            TOKENIZER("", "null", pre, "null", ASCII)
#define ADDED(list)           TOKENIZER(list, "null", "null", "null", ASCII)
#define TOKEN(id, text, more) "{'id':" #id ",'content':'" text "'" more "}"

/* a..f 0-5, space 6, ab 7, abc 8, '1' 9, '2' 10, mark 11, mark a 12, e-acute 13, '-' 14, "aa" 15 */
#define ASCII                                                                                      \
    "'type':'BPE','vocab':{'a':0,'b':1,'c':2,'d':3,'e':4,'f':5,' ':6,'ab':7,'abc':8,'1':9,'2':10," \
    "'\xe2\x96\x81':11,'\xe2\x96\x81"                                                              \
    "a':12,'\xc3\xa9':13,'-':14,'aa':15},"                                                         \
    "'merges':['a b',['ab','c'],'a a','\xe2\x96\x81 a']"
#define MARK "\xe2\x96\x81"

static const struct {
    const char *name, *json, *text, *ids;
    bool special;
} cases[] = {
    /* the model */
    {"merges", PLAIN(ASCII), "abcd", "8 3", false},
    {"lowest rank first", PLAIN(ASCII), "aab", "0 7", false},
    {"leftmost of equal ranks", PLAIN(ASCII), "aaa", "15 0", false},
    {"unknown vanish", PLAIN(ASCII), "axb", "7", false},
    {"empty text", PLAIN(ASCII), "", "", false},
    {"ignore_merges",
     PLAIN("'type':'BPE','ignore_merges':true,'vocab':{'a':0,'b':1,'ab':2},"
           "'merges':[]"),
     "ab", "2", false},
    {"no ignore_merges", PLAIN("'type':'BPE','vocab':{'a':0,'b':1,'ab':2},'merges':[]"), "ab",
     "0 1", false},
    {"#version line", PLAIN("'vocab':{'a':0,'b':1,'ab':2},'merges':['#version: 0.2','a b']"), "ab",
     "2", false},
    {"later of equal merges",
     PLAIN("'vocab':{'a':0,'b':1,'c':2,'ab':3,'bc':4},"
           "'merges':['a b','b c','a b']"),
     "abc", "0 4", false},
    {"unk", PLAIN("'unk_token':'u','vocab':{'u':0,'a':1},'merges':[]"), "xxax", "0 0 1 0", false},
    {"fuse_unk", PLAIN("'unk_token':'u','fuse_unk':true,'vocab':{'u':0,'a':1},'merges':[]"), "xxax",
     "0 1 0", false},
    {"unk_token unknown", PLAIN("'unk_token':'u','vocab':{'a':1},'merges':[]"), "x",
     "unk_token, which is not in the vocabulary", false},
    {"byte_fallback",
     PLAIN("'byte_fallback':true,'unk_token':'u','vocab':{'u':0,'<0xC3>':1,"
           "'<0xA9>':2,'a':3},'merges':[]"),
     "a\xc3\xa9x", "3 1 2 0", false},
    {"bytes overtake unk",
     PLAIN("'byte_fallback':true,'unk_token':'u','vocab':{'u':0,'<0xC3>':1,"
           "'<0xA9>':2},'merges':[]"),
     "x\xc3\xa9", "1 2 0", false},
    {"merges of a byte token",
     PLAIN("'byte_fallback':true,'vocab':{'<0x0A>':0,'a':1,'<0x0A>a':2},"
           "'merges':['<0x0A> a']"),
     "\na\n", "2 0", false},
    {"merge across the mark",
     PLAIN("'vocab':{'a':0,'" MARK "':1,'a" MARK "':2},'merges':['a " MARK "']"), "a" MARK, "2",
     false},
    {"suffix",
     PLAIN("'end_of_word_suffix':'</w>','vocab':{'a':0,'b</w>':1,'ab</w>':2},'merges':["
           "['a','b</w>']]"),
     "aab", "0 2", false},
    {"prefix",
     PLAIN("'continuing_subword_prefix':'#','vocab':{'a':0,'#a':1,'#b':2,'#ab':3},"
           "'merges':[['#a','#b']]"),
     "aab", "0 3", false},
    {"WordLevel", PLAIN("'type':'WordLevel','unk_token':'u','vocab':{'u':0,'ab':1}"), "ab", "1",
     false},
    {"WordLevel unknown", PLAIN("'type':'WordLevel','unk_token':'u','vocab':{'u':0,'ab':1}"), "abc",
     "0", false},
    {"WordPiece", PLAIN("'type':'WordPiece','vocab':{'[UNK]':0,'a':1,'ab':2,'##b':3,'##bc':4}"),
     "abbc", "2 4", false},
    {"WordPiece unknown", PLAIN("'type':'WordPiece','vocab':{'[UNK]':0,'a':1,'##b':3}"), "abc", "0",
     false},
    {"WordPiece too long",
     PLAIN("'type':'WordPiece','max_input_chars_per_word':2,'vocab':{'[UNK]':0,'a':1,'##b':3}"),
     "abb", "0", false},
    {"WordPiece without unk", PLAIN("'type':'WordPiece','vocab':{'a':1}"), "b", "unk_token", false},
    {"Unigram", PLAIN("'unk_id':0,'vocab':[['u',0],['a',-1],['b',-1],['ab',-1.5],['ba',-4]]"),
     "abab", "3 3", false},
    {"Unigram unknown", PLAIN("'unk_id':0,'vocab':[['u',0],['a',-1]]"), "xyaz", "0 1 0", false},
    {"Unigram without unk", PLAIN("'vocab':[['a',-1]]"), "ax", "unk_id is missing", false},
    {"Unigram bytes",
     PLAIN("'unk_id':0,'byte_fallback':true,'vocab':[['u',0],['a',-1],['<0xC3>',0],['<0xA9>',0]]"),
     "a\xc3\xa9x", "1 0", false},
    {"unknown run of Unigram is a token", PLAIN("'unk_id':0,'vocab':[['u',0],['xy',-99]]"), "xy",
     "1", false},
    /* normalizers */
    {"BertNormalizer",
     NORMALIZED("{'type':'BertNormalizer','clean_text':true,'handle_chinese_chars':true,"
                "'strip_accents':null,'lowercase':true}"),
     "A\xcc\x81\x01\tB\xe4\xb8\x80", "0 6 1 6 6", false},
    {"NFC", NORMALIZED("{'type':'NFC'}"), "ae\xcc\x81", "0 13", false},
    {"NFC of marks alone", NORMALIZED("{'type':'NFC'}"), "\xcc\x81\xcc\xa3", "", false},
    {"NFD", NORMALIZED("{'type':'NFD'}"), "\xc3\xa9", "4", false},
    {"NFKC", NORMALIZED("{'type':'NFKC'}"), "\xef\xbc\x91\xc2\xb2", "9 10", false},
    {"NFKD", NORMALIZED("{'type':'NFKD'}"), "\xc2\xb2", "10", false},
    {"Lowercase", NORMALIZED("{'type':'Lowercase'}"), "AB\xc3\x89", "7 13", false},
    {"Strip", NORMALIZED("{'type':'Strip','strip_left':true,'strip_right':true}"),
     "\xe3\x80\x80 a b\t", "0 6 1", false},
    {"Strip left", NORMALIZED("{'type':'Strip','strip_left':true,'strip_right':false}"), " a ",
     "0 6", false},
    {"Strip all", NORMALIZED("{'type':'Strip','strip_left':true,'strip_right':true}"), " \n", "",
     false},
    {"Prepend", NORMALIZED("{'type':'Prepend','prepend':'" MARK "'}"), "ab", "11 7", false},
    {"Prepend to nothing", NORMALIZED("{'type':'Prepend','prepend':'" MARK "'}"), "", "", false},
    {"Replace", NORMALIZED("{'type':'Replace','pattern':{'String':' '},'content':'" MARK "'}"),
     "b a", "1 12", false},
    {"Replace regex", NORMALIZED("{'type':'Replace','pattern':{'Regex':'[0-9]+'},'content':'d'}"),
     "a12b2", "0 3 1 3", false},
    {"Llama 2",
     NORMALIZED("{'type':'Sequence','normalizers':[{'type':'Prepend','prepend':'" MARK
                "'},{'type':'Replace','pattern':{'String':' '},'content':'" MARK "'}]}"),
     "ab a", "11 7 12", false},
    /* pre-tokenizers */
    {"Digits", SPLIT("{'type':'Digits','individual_digits':true}"), "a12", "0 9 10", false},
    {"Metaspace", SPLIT("{'type':'Metaspace','replacement':'" MARK "','prepend_scheme':'always'}"),
     "a a", "12 12", false},
    {"Metaspace, old",
     SPLIT("{'type':'Metaspace','replacement':'" MARK "','add_prefix_space':false}"), "a a", "0 12",
     false},
    {"Metaspace first",
     TOKENIZER(TOKEN(16, "<x>", ""), "null",
               "{'type':'Metaspace','replacement':"
               "'" MARK "','prepend_scheme':'first','split':false}",
               "null", ASCII),
     "a<x>a", "12 16 0", false},
    {"Metaspace first, later",
     TOKENIZER(TOKEN(16, "<x>", ""), "null",
               "{'type':'Metaspace',"
               "'replacement':'" MARK "','prepend_scheme':'first'}",
               "null", ASCII),
     "<x>a", "16 0", false},
#define FIRST(pattern, content)                                                                    \
    TOKENIZER("", "{'type':'Replace','pattern':{'Regex':'" pattern "'},'content':'" content "'}",  \
              "{'type':'Metaspace','replacement':'" MARK "','prepend_scheme':'first'}", "null",    \
              ASCII)
    {"Metaspace first, replaced", FIRST("b+", "a"), "bc", "12 2", false},
    {"Metaspace first, replaced with what follows", FIRST("b+", "a"), "bbc", "0 2", false},
    {"Metaspace first, removed", FIRST("^b", ""), "bc", "2", false},
    {"Metaspace first, put before", FIRST("^", "a"), "b", "11 7", false},
    {"Metaspace first, nothing put before", FIRST("^", ""), "b", "11 1", false},
    {"Split isolated", SPLIT("{'type':'Split','pattern':{'String':'b'},'behavior':'Isolated'}"),
     "abc", "0 1 2", false},
    {"Split removed", SPLIT("{'type':'Split','pattern':{'String':'b'},'behavior':'Removed'}"),
     "abaa", "0 15", false},
    {"Split with previous",
     SPLIT("{'type':'Split','pattern':{'String':'a'},'behavior':"
           "'MergedWithPrevious'}"),
     "baaab", "1 0 0 0 1", false},
    {"Split with next",
     SPLIT("{'type':'Split','pattern':{'String':'a'},'behavior':"
           "'MergedWithNext'}"),
     "aaab", "0 0 7", false},
    {"Split contiguous", SPLIT("{'type':'Split','pattern':{'String':'a'},'behavior':'Contiguous'}"),
     "aab", "15 1", false},
    {"Split inverted",
     SPLIT("{'type':'Split','pattern':{'Regex':'a+'},'behavior':'Removed',"
           "'invert':true}"),
     "baacab", "15 0", false},
    {"Whitespace", SPLIT("{'type':'Whitespace'}"), "a b-c", "0 1 14 2", false},
    {"Punctuation", SPLIT("{'type':'Punctuation'}"), "ab-", "7 14", false},
    {"WhitespaceSplit", SPLIT("{'type':'WhitespaceSplit'}"),
     "a\xc2\x85"
     "b",
     "0 1", false},
    /* post-processors */
    {"template",
     TOKENIZER("", "null", "null",
               "{'type':'Sequence','processors':[{'type':"
               "'ByteLevel'},{'type':'TemplateProcessing','single':[{'SpecialToken':"
               "{'id':'B'}},{'Sequence':{'id':'A'}},{'SpecialToken':{'id':'E'}}],"
               "'special_tokens':{'B':{'ids':[5,4]},'E':{'ids':[3]}}}]}",
               ASCII),
     "ab", "5 4 7 3", true},
    {"template, not wanted",
     TOKENIZER("", "null", "null",
               "{'type':'TemplateProcessing','single':"
               "[{'SpecialToken':{'id':'B'}},{'Sequence':{'id':'A'}}],"
               "'special_tokens':{'B':{'ids':[5]}}}",
               ASCII),
     "ab", "7", false},
    /* added tokens */
    {"added", ADDED(TOKEN(16, "<x>", "")), "a<x>b", "0 16 1", false},
    {"added, of the vocabulary", ADDED(TOKEN(3, "d", "")), "adb", "0 3 1", false},
    {"longest", ADDED(TOKEN(16, "<x", "") "," TOKEN(17, "<x>y", "")), "<x>y<x>", "17 16", false},
    {"leftmost", ADDED(TOKEN(16, "cd", "") "," TOKEN(17, "defa", "")), "cdefa", "16 4 5 0", false},
    {"single_word", ADDED(TOKEN(16, "dd", ",'single_word':true")), "dd add dd1 -dd",
     "16 6 0 3 3 6 3 3 9 6 14 16", false},
    {"lstrip", ADDED(TOKEN(16, "<x>", ",'lstrip':true")), "a \n<x> b", "0 16 6 1", false},
    {"rstrip", ADDED(TOKEN(16, "<x>", ",'rstrip':true")), "a <x> \tb", "0 6 16 1", false},
    {"blanks that are swallowed already",
     ADDED(TOKEN(16, "<x>", ",'rstrip':true") "," TOKEN(17, "  ", ",'lstrip':true")), "<x>  b  a",
     "16 1 17 0", false},
    {"more blanks than are swallowed already",
     ADDED(TOKEN(16, "  ", ",'lstrip':true,'rstrip':true")), "a    b", "0 16 1", false},
    {"swallowed blanks, without lstrip",
     ADDED(TOKEN(16, "<x>", ",'rstrip':true") "," TOKEN(17, "  ", "")), "<x>  b", "16 17 1", false},
    {"normalized",
     TOKENIZER(TOKEN(16, "EF", ",'normalized':true") "," TOKEN(17, "FE", ""),
               "{'type':'Lowercase'}", "null", "null", ASCII),
     "EFefFEfe", "16 16 17 5 4", false},
};

static void test_cases(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct qt_tokenizer *tok;
        struct qt_err err = {0};
        expect_ok(cases[i].name, open_json(&tok, dir, cases[i].json, &err), &err);
        const char *got = encoded(tok, cases[i].text, strlen(cases[i].text), cases[i].special);
        bool is_error = cases[i].ids[0] > '9';
        if (is_error ? !strstr(got, cases[i].ids) : strcmp(got, cases[i].ids) != 0)
            fail_msg("%s: got \"%s\", expected \"%s\"", cases[i].name, got, cases[i].ids);
        qt_tokenizer_close(tok);
    }
    fixture_remove(dir);
}

/* ---- patterns ------------------------------------------------------------------------------- */

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define LLAMA3                                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"                      \
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* Matches with "/" between them. */
static const struct {
    const char *pattern, *text, *matches;
} patterns[] = {
    {GPT2, "I'm 12 ok,  yes\n\n x", "I/'m/ 12/ ok/,/ / yes/\n\n/ x"},
    {GPT2, "I'M", "I/'/M"},
    {LLAMA3, "I'M 12345 (ok)\r\n\n  x", "I/'M/ /123/45/ (/ok/)\r\n\n/ / x"},
    {LLAMA3, "a'\xc5\xbf", "a/'\xc5\xbf"}, /* long s folds to s */
    /* U+180E is not White_Space since Unicode 6.3; U+0085 and VT are. */
    {"\\s", "\xe1\xa0\x8e\xc2\x85\v", "\xc2\x85/\v"},
    {"[^\\s]", "\xe1\xa0\x8e\xc2\x85\v", "\xe1\xa0\x8e"},
    {"\\S", "\xe1\xa0\x8e\xc2\x85", "\xe1\xa0\x8e"},
    {"[\\S]", "\xe1\xa0\x8e\xc2\x85", "\xe1\xa0\x8e"},
    {"\\w+", "a_\xcc\x81\xe2\x93\x90-\xe2\x82\xac", "a_\xcc\x81\xe2\x93\x90"},
    {"[\\w]\\W", "a-b", "a-"},
    {"\\d", "1\xd9\xa3\xc2\xb2", "1/\xd9\xa3"},
    {"\\v", "\n\v", "\v"},
    {"^.$", "a\nb\r", "a"},
    {"x*", "axxb", "/xx/"}, /* no empty match right after a match; the one at the end is there */
    {"\\x41|\\x{e9}|\\u00ea", "A\xc3\xa9\xc3\xaa", "A/\xc3\xa9/\xc3\xaa"},
    {"a{2}|b{1,}|{|}|]", "aabb{}]", "aa/bb/{/}/]"},
    {"\\p{^L}\\P{L}", "a12", "12"},
    {"\\p{Han}+", "\xe4\xb8\x80\xe3\x80\x82", "\xe4\xb8\x80"}, /* U+3002 only by extension */
    {"(a|b)+(?=c)", "abc", "ab"},
    {"[a-c-]+", "b-d", "b-"},
    {"(?i)AB", "aBAb", "aB/Ab"},
};

static void test_patterns(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        struct qt_regex *regex;
        struct qt_regex_work *work;
        struct qt_err err = {0};
        char got[256] = "";
        bool found;
        size_t start, end;
        expect_ok(patterns[i].pattern, qt_regex_new(&regex, patterns[i].pattern, false, "f", &err),
                  &err);
        expect_ok("work",
                  qt_regex_work_new(&work, patterns[i].text, strlen(patterns[i].text), NULL, &err),
                  &err);
        struct qt_regex_scan scan = {.regex = regex,
                                     .work = work,
                                     .text = patterns[i].text,
                                     .size = strlen(patterns[i].text)};
        for (bool first = true;; first = false) {
            expect_ok("next", qt_regex_next(&found, &start, &end, &scan, &err), &err);
            if (!found)
                break;
            strcat(got, first ? "" : "/");
            strncat(got, patterns[i].text + start, end - start);
        }
        if (strcmp(got, patterns[i].matches) != 0)
            fail_msg("%s: got \"%s\", expected \"%s\"", patterns[i].pattern, got,
                     patterns[i].matches);
        qt_regex_work_free(work);
        qt_regex_free(regex);
    }
}

/* A long text is searched in windows; the matches are those of PCRE2 in the whole text. */
static void test_windows(void **state)
{
    static const char *const windowed[] = {
        "[a-z]+|[ ]+(?![^ ])|[^a-z ]+",
        "a+?b|c+(?=d{3})|(?<=ab)c|(?<![a-c])d+",
        "^[a-d]+$|x*",
        "(?:ab|ba|c)+(?!d)",
        "[a-d ]{100,9000}",
        "d[^d]*\\z|e",
        "(?<=d)",
    };
    enum { N = 60000 };
    (void)state;
    char *text = malloc(N);
    uint64_t seed = 7;
    assert_non_null(text);
    for (size_t i = 0, run = 0; i<N; i++, run -= run> 0) {
        const uint64_t r = qt_splitmix64(&seed);
        if (run == 0 && r % 64 == 0)
            run = r / 64 % 9000; /* runs of one character, longer than a window */
        text[i] = run && i ? text[i - 1] : "aaabbbccdd  \n"[r % 13];
    }
    for (size_t p = 0; p < sizeof windowed / sizeof *windowed; p++) {
        struct qt_regex *regex;
        struct qt_regex_work *work;
        struct qt_err err = {0};
        int code;
        PCRE2_SIZE offset;
        size_t start, end, from = 0, count = 0;
        bool found, again = false;
        expect_ok("regex", qt_regex_new(&regex, windowed[p], false, "f", &err), &err);
        expect_ok("work", qt_regex_work_new(&work, text, N, NULL, &err), &err);
        pcre2_code *plain =
            pcre2_compile((PCRE2_SPTR)windowed[p], PCRE2_ZERO_TERMINATED,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &code, &offset, NULL);
        pcre2_match_data *data = pcre2_match_data_create(1, NULL);
        assert_non_null(plain);
        pcre2_jit_compile(plain, PCRE2_JIT_COMPLETE);
        struct qt_regex_scan scan = {.regex = regex, .work = work, .text = text, .size = N};
        while (from <= N &&
               pcre2_match(plain, (PCRE2_SPTR)text, N, from, PCRE2_NO_UTF_CHECK, data, NULL) >= 0) {
            const PCRE2_SIZE *at = pcre2_get_ovector_pointer(data);
            if (at[0] == at[1] && again && at[1] == from) {
                from++;
                again = false;
                continue;
            }
            expect_ok("next", qt_regex_next(&found, &start, &end, &scan, &err), &err);
            if (!found || start != at[0] || end != at[1])
                fail_msg("%s: match %zu is [%zu, %zu), expected [%zu, %zu)", windowed[p], count,
                         start, end, at[0], at[1]);
            from = end;
            again = true;
            count++;
        }
        expect_ok("last", qt_regex_next(&found, &start, &end, &scan, &err), &err);
        assert_false(found);
        assert_true(count > 0);
        pcre2_match_data_free(data);
        pcre2_code_free(plain);
        qt_regex_work_free(work);
        qt_regex_free(regex);
    }
    free(text);
}

static void test_patterns_refused(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *reason;
    } refused[] = {
        {"", "empty"},
        {"a\\b", "escape at offset 1"},
        {"\\h", "escape"},
        {"\\K", "escape"},
        {"\\1", "escape"},
        {"\\R", "escape"},
        {"\\", "escape"},
        {"[[:alpha:]]", "POSIX"},
        {"[a[[:alpha:]]]", "POSIX"},
        {"[a&&]", "empty set"},
        {"[[a]", "unterminated"},
        {"[]a]", "empty set"},
        {"[a", "unterminated"},
        {"[\\W]", "\\W in a set"},
        {"[\\s-a]", "range"},
        {"[!-\\d]", "range"},
        {"a{2}+", "quantifier"},
        {"a{2}?", "quantifier"},
        {"a{,2}", "minimum"},
        {"(*UTF)", "group"},
        {"(?<n>a)", "group"},
        {"(?m)a", "group"},
        {"a(?i)b", "group"},
        {"(?#c)", "group"},
        {"a)", "parenthesis"},
        {"(a", "parenthesis"},
        {"(?i:ss)", "ligature"},
        {"(?i:\xc3\xa9)", "non-ASCII"},
        {"(?i:\\p{Lu})", "case"},
        {"\\pL", "braces"},
        {"\\p{Nonsense}", "regex"},
        {"\\p{}", "property"},
        {"\\x{110000}", "regex"},
        {"\\xe9", "code"},
        {"\\x4", "code"},
        {"*a", "regex"},
        {"(?<=a+)b", "regex"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct qt_regex *regex;
        struct qt_err err = {0};
        int rc = qt_regex_new(&regex, refused[i].pattern, false, "f.json", &err);
        expect_error(refused[i].pattern, rc, QT_E_UNSUPPORTED, refused[i].reason, &err);
        expect_error(refused[i].pattern, rc, QT_E_UNSUPPORTED, "f.json: ", &err);
        assert_null(regex);
    }
}

/* Exponential backtracking ends in an error. */
static void test_match_limit(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    expect_ok("open",
              open_json(&tok, dir,
                        SPLIT("{'type':'Split','pattern':{'Regex':'(a+)+$'},"
                              "'behavior':'Isolated'}"),
                        &err),
              &err);
    const char *got = encoded(tok, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", 50, false);
    assert_non_null(strstr(got, "the regex '(a+)+$' takes too many steps at byte 0 of the text"));
    qt_tokenizer_close(tok);

    /* Many matches, each within any limit for one match, and a quadratic search. */
    static const char *const slow[] = {"(?:a|a|a|a){7}x|a", "a+x|a"};
    enum { N = 50000 };
    char *text = malloc(N);
    assert_non_null(text);
    memset(text, 'a', N);
    for (size_t i = 0; i < 2; i++) {
        char json[2048];
        snprintf(json, sizeof json,
                 SPLIT("{'type':'Split','pattern':{'Regex':'%s'},'behavior':'Isolated'}"), slow[i]);
        expect_ok("open", open_json(&tok, dir, json, &err), &err);
        got = encoded(tok, text, N, false);
        assert_non_null(strstr(got, "takes too many steps at byte"));
        qt_tokenizer_close(tok);
    }
    free(text);
    fixture_remove(dir);
}

/* ---- byte level ----------------------------------------------------------------------------- */

/* GPT-2's characters for bytes: space is U+0120, newline U+010A, 0xC3 U+00C3, 0xA9 U+00A9. */
static void test_byte_level(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
#define BYTE_VOCAB                                                                                 \
    "'vocab':{'a':0,'b':1,'\xc4\xa0':2,'\xc4\xa0"                                                  \
    "a':3,'\xc4\x8a':4,'\xc3\x83':5,'\xc2\xa9':6,'\xc3\x83\xc2\xa9':7,'ab':8},"                    \
    "'merges':['\xc4\xa0 a','\xc3\x83 \xc2\xa9','a b']"
    expect_ok("open",
              open_json(&tok, dir,
                        TOKENIZER("", "null",
                                  "{'type':'ByteLevel','add_prefix_space':"
                                  "false}",
                                  "null", BYTE_VOCAB),
                        &err),
              &err);
    assert_string_equal(encoded(tok, "ab  a\n\xc3\xa9", 9, false), "8 2 3 4 7");
    qt_tokenizer_close(tok);
    expect_ok("open",
              open_json(&tok, dir,
                        TOKENIZER("", "null",
                                  "{'type':'ByteLevel','add_prefix_space':"
                                  "true}",
                                  "null", BYTE_VOCAB),
                        &err),
              &err);
    assert_string_equal(encoded(tok, "ab", 2, false), "3 1");
    assert_string_equal(encoded(tok, " ab", 3, false), "3 1");
    assert_int_equal(qt_tokenizer_vocab(tok), 9);
    qt_tokenizer_close(tok);
    fixture_remove(dir);
}

/* ---- tokenizer_config.json ------------------------------------------------------------------ */

static void test_add_bos(void **state)
{
    (void)state;
    static const struct {
        const char *config, *post, *ids;
    } rows[] = {
        {"{'tokenizer_class':'LlamaTokenizer','add_bos_token':true,'bos_token':'f'}", "null",
         "5 7"},
        {"{'tokenizer_class':'LlamaTokenizerFast','add_bos_token':true,'bos_token':"
         "{'content':'<s>'}}",
         "null", "16 7"},
        {"{'tokenizer_class':'LlamaTokenizer','add_bos_token':false,'bos_token':'f'}", "null", "7"},
        {"{'tokenizer_class':'LlamaTokenizer','bos_token':'f'}", "null", "7"},
        {"{'tokenizer_class':'GPT2Tokenizer','add_bos_token':true,'bos_token':'f'}", "null", "7"},
        {"{'tokenizer_class':'LlamaTokenizer','add_bos_token':true,'bos_token':'f'}",
         "{'type':'ByteLevel'}", "5 7"},
        {"{'tokenizer_class':'LlamaTokenizer','add_bos_token':true,'bos_token':'f'}",
         "{'type':'TemplateProcessing','single':[{'Sequence':{'id':'A'}}]}", "7"},
        {"{'tokenizer_class':'LlamaTokenizer','add_bos_token':true,'bos_token':'?'}", "null",
         "bos_token is not a token"},
        {"{'add_bos_token':3}", "null", "add_bos_token"},
        {"{'model_max_length':1000000000000000019884624838656,'tokenizer_class':'LlamaTokenizer',"
         "'add_bos_token':true,'bos_token':'f'}",
         "null", "5 7"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *dir = fixture_dir(), json[4096];
        struct qt_tokenizer *tok;
        struct qt_err err = {0};
        snprintf(json, sizeof json, TOKENIZER(TOKEN(16, "<s>", ""), "null", "null", "%s", ASCII),
                 rows[i].post);
        write_json(dir, "tokenizer_config.json", rows[i].config);
        int rc = open_json(&tok, dir, json, &err);
        if (rows[i].ids[0] > '9') {
            expect_error(rows[i].config, rc, QT_E_INPUT, rows[i].ids, &err);
            expect_error(rows[i].config, rc, QT_E_INPUT, "tokenizer_config.json: ", &err);
        } else {
            expect_ok(rows[i].config, rc, &err);
            assert_string_equal(encoded(tok, "ab", 2, true), rows[i].ids);
            qt_tokenizer_close(tok);
        }
        fixture_remove(dir);
    }
}

/* ---- hostile files -------------------------------------------------------------------------- */

#define V "'vocab':{'a':0,'b':1}"
static const struct {
    const char *name, *json, *reason;
    enum qt_status status;
} hostile[] = {
    {"not an object", "[]", "not a JSON object", QT_E_INPUT},
    {"not JSON", "{", "line 1", QT_E_INPUT},
    {"bad UTF-8", "{'a':'\xff'}", "unable to decode", QT_E_INPUT},
    {"no model", "{}", "no 'model' object", QT_E_INPUT},
    {"model of wrong type", "{'model':3}", "no 'model' object", QT_E_INPUT},
    {"unknown model", PLAIN("'type':'Xyz'"), "tokenizer model 'Xyz'", QT_E_UNSUPPORTED},
    {"Unigram without vocab", PLAIN("'type':'Unigram'"), "model.vocab", QT_E_INPUT},
    {"Unigram object", PLAIN("'type':'Unigram'," V), "model.vocab", QT_E_INPUT},
    {"Unigram entry", PLAIN("'vocab':[['a',1],['b']]"), "entry 1", QT_E_INPUT},
    {"Unigram score", PLAIN("'vocab':[['a','b']]"), "entry 0", QT_E_INPUT},
    {"Unigram unk_id", PLAIN("'vocab':[['a',1]],'unk_id':1"), "unk_id", QT_E_INPUT},
    {"WordPiece without vocab", PLAIN("'type':'WordPiece'"), "model.vocab", QT_E_INPUT},
    {"WordPiece length", PLAIN("'type':'WordPiece'," V ",'max_input_chars_per_word':-1"),
     "max_input_chars_per_word", QT_E_INPUT},
    {"no vocab", PLAIN("'merges':[]"), "model.vocab", QT_E_INPUT},
    {"empty vocab", PLAIN("'vocab':{},'merges':[]"), "model.vocab", QT_E_INPUT},
    {"vocab array", PLAIN("'vocab':[],'merges':[]"), "model.vocab", QT_E_INPUT},
    {"negative id", PLAIN("'vocab':{'a':-1},'merges':[]"), "'a'", QT_E_INPUT},
    {"huge id", PLAIN("'vocab':{'a':16777216},'merges':[]"), "'a'", QT_E_INPUT},
    {"larger id", PLAIN("'vocab':{'a':9223372036854775807},'merges':[]"), "'a'", QT_E_INPUT},
    {"real id", PLAIN("'vocab':{'a':1.0},'merges':[]"), "'a'", QT_E_INPUT},
    {"string id", PLAIN("'vocab':{'a':'1'},'merges':[]"), "'a'", QT_E_INPUT},
    {"duplicate id", PLAIN("'vocab':{'a':1,'b':1},'merges':[]"), "taken", QT_E_INPUT},
    {"duplicate token", PLAIN("'vocab':{'a':1,'a':2},'merges':[]"), "duplicate", QT_E_INPUT},
    {"no merges", PLAIN("'type':'BPE'," V), "model.merges", QT_E_INPUT},
    {"merges object", PLAIN(V ",'merges':{}"), "model.merges", QT_E_INPUT},
    {"merge number", PLAIN(V ",'merges':[3]"), "merge 0 is not a pair", QT_E_INPUT},
    {"merge of one", PLAIN(V ",'merges':['a']"), "merge 0 is not a pair", QT_E_INPUT},
    {"merge of three", PLAIN(V ",'merges':['a b a']"), "merge 0 is not a pair", QT_E_INPUT},
    {"merge array of three", PLAIN(V ",'merges':[['a','b','a']]"), "is not a pair", QT_E_INPUT},
    {"merge of numbers", PLAIN(V ",'merges':[[1,2]]"), "is not a pair", QT_E_INPUT},
    {"merge of unknown", PLAIN(V ",'merges':['a x']"), "'x'", QT_E_INPUT},
    {"merge into unknown", PLAIN(V ",'merges':['a b']"), "'ab'", QT_E_INPUT},
    {"dropout", PLAIN(V ",'merges':[],'dropout':0.1"), "dropout", QT_E_UNSUPPORTED},
    {"dropout string", PLAIN(V ",'merges':[],'dropout':'x'"), "dropout", QT_E_INPUT},
    {"suffix", PLAIN(V ",'merges':[],'end_of_word_suffix':1"), "end_of_word_suffix", QT_E_INPUT},
    {"flag of wrong type", PLAIN(V ",'merges':[],'fuse_unk':1"), "fuse_unk", QT_E_INPUT},
    {"unk_token number", PLAIN(V ",'merges':[],'unk_token':1"), "unk_token", QT_E_INPUT},
    {"normalizer", NORMALIZED("{'type':'Nmt'}"), "normalizer 'Nmt'", QT_E_UNSUPPORTED},
    {"no charsmap", NORMALIZED("{'type':'Precompiled'}"), "precompiled_charsmap", QT_E_INPUT},
    {"charsmap not base64", NORMALIZED("{'type':'Precompiled','precompiled_charsmap':'?'}"),
     "not base64", QT_E_INPUT},
    {"charsmap too short", NORMALIZED("{'type':'Precompiled','precompiled_charsmap':'AAA='}"),
     "damaged", QT_E_INPUT},
    {"charsmap trie too long",
     NORMALIZED("{'type':'Precompiled','precompiled_charsmap':'////fwA='}"), "damaged", QT_E_INPUT},
    {"normalizer number", NORMALIZED("3"), "normalizer is not an object", QT_E_INPUT},
    {"normalizer without type", NORMALIZED("{}"), "type", QT_E_INPUT},
    {"normalizers missing", NORMALIZED("{'type':'Sequence'}"), "normalizers", QT_E_INPUT},
    {"prepend missing", NORMALIZED("{'type':'Prepend'}"), "prepend", QT_E_INPUT},
    {"replace without pattern", NORMALIZED("{'type':'Replace','content':''}"), "pattern",
     QT_E_INPUT},
    {"pre-tokenizer", SPLIT("{'type':'CharDelimiterSplit'}"), "pre-tokenizer 'CharDelimiterSplit'",
     QT_E_UNSUPPORTED},
    {"nested pre-tokenizer", SPLIT("{'type':'Sequence','pretokenizers':[{'type':'Xyz'}]}"),
     "pre-tokenizer 'Xyz'", QT_E_UNSUPPORTED},
    {"split behavior", SPLIT("{'type':'Split','pattern':{'String':'a'},'behavior':'Odd'}"), "'Odd'",
     QT_E_UNSUPPORTED},
    {"bad regex", SPLIT("{'type':'Split','pattern':{'Regex':'(a'},'behavior':'Removed'}"), "'(a'",
     QT_E_UNSUPPORTED},
    {"Metaspace contradiction",
     SPLIT("{'type':'Metaspace','replacement':'_','prepend_scheme':"
           "'first','add_prefix_space':false}"),
     "contradicts", QT_E_INPUT},
    {"Metaspace scheme", SPLIT("{'type':'Metaspace','replacement':'_','prepend_scheme':'no'}"),
     "'no'", QT_E_UNSUPPORTED},
    {"post-processor", TOKENIZER("", "null", "null", "{'type':'Xyz'}", ASCII),
     "post-processor 'Xyz'", QT_E_UNSUPPORTED},
    {"post-processor without tokens",
     TOKENIZER("", "null", "null", "{'type':'BertProcessing'}", ASCII), "'cls'", QT_E_INPUT},
    {"post-processor id",
     TOKENIZER("", "null", "null",
               "{'type':'RobertaProcessing','cls':['a',0],'sep':"
               "['b',16]}",
               ASCII),
     "'sep'", QT_E_INPUT},
    {"template without $A",
     TOKENIZER("", "null", "null",
               "{'type':'TemplateProcessing','single':"
               "[]}",
               ASCII),
     "lacks $A", QT_E_INPUT},
    {"template unknown token",
     TOKENIZER("", "null", "null",
               "{'type':'TemplateProcessing',"
               "'single':[{'SpecialToken':{'id':'B'}}]}",
               ASCII),
     "'B'", QT_E_INPUT},
    {"template id",
     TOKENIZER("", "null", "null",
               "{'type':'TemplateProcessing','single':[{"
               "'SpecialToken':{'id':'B'}}],'special_tokens':{'B':{'ids':[16]}}}",
               ASCII),
     "id of 'B'", QT_E_INPUT},
    {"template $B",
     TOKENIZER("", "null", "null",
               "{'type':'TemplateProcessing','single':[{"
               "'Sequence':{'id':'B'}}]}",
               ASCII),
     "item 0", QT_E_UNSUPPORTED},
    {"two templates",
     TOKENIZER("", "null", "null",
               "{'type':'Sequence','processors':[{'type':'TemplateProcessing','single':"
               "[{'Sequence':{'id':'A'}}]},{'type':'TemplateProcessing','single':"
               "[{'Sequence':{'id':'A'}}]}]}",
               ASCII),
     "more than one TemplateProcessing", QT_E_UNSUPPORTED},
    {"added_tokens object", "{'added_tokens':{},'model':{" ASCII "}}", "added_tokens", QT_E_INPUT},
    {"added number", ADDED("3"), "not an object", QT_E_INPUT},
    {"added without id", ADDED("{'content':'x'}"), "id", QT_E_INPUT},
    {"added negative id", ADDED(TOKEN(-1, "x", "")), "id", QT_E_INPUT},
    {"added huge id", ADDED(TOKEN(16777216, "x", "")), "16777216", QT_E_INPUT},
    {"added gap", ADDED(TOKEN(17, "x", "")), "'x' has id 17 where it must be 16", QT_E_INPUT},
    {"added against vocabulary", ADDED(TOKEN(1, "a", "")), "must be 0", QT_E_INPUT},
    {"added twice", ADDED(TOKEN(16, "x", "") "," TOKEN(17, "x", "")), "twice", QT_E_INPUT},
    {"added flag", ADDED(TOKEN(16, "x", ",'lstrip':'yes'")), "lstrip", QT_E_INPUT},
    {"added to nothing",
     TOKENIZER(TOKEN(16, "\\n", ",'normalized':true"),
               "{'type':'Strip','strip_left':true,'strip_right':true}", "null", "null", ASCII),
     "empty after normalization", QT_E_UNSUPPORTED},
};

static void test_hostile(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        struct qt_tokenizer *tok = (struct qt_tokenizer *)dir;
        struct qt_err err = {0};
        char reason[128];
        snprintf(reason, sizeof reason, "%s", hostile[i].reason);
        if (strcmp(reason, "no 'model' object") == 0)
            snprintf(reason, sizeof reason, "no \"model\" object");
        int rc = open_json(&tok, dir, hostile[i].json, &err);
        expect_error(hostile[i].name, rc, hostile[i].status, reason, &err);
        expect_error(hostile[i].name, rc, hostile[i].status, "/tokenizer.json: ", &err);
        assert_null(tok);
    }
    fixture_remove(dir);
}

/* ---- other files ---------------------------------------------------------------------------- */

static const char *encoded_file(const char *name, const char *data, size_t size, const char *text,
                                bool special)
{
    static char out[4096];
    char *dir = fixture_dir();
    struct qt_tokenizer *tok;
    struct qt_detokenizer *back;
    struct qt_err err = {0};
    char *copy = malloc(size + 1);
    assert_non_null(copy);
    memcpy(copy, data, size);
    for (size_t i = 0; strstr(name, "json") && i < size; i++)
        copy[i] = copy[i] == '\'' ? '"' : copy[i];
    fixture_write(dir, name, copy, size);
    if (qt_tokenizer_open(&tok, dir, &err) < 0) {
        qt_err_format(out, sizeof out, &err);
    } else {
        snprintf(out, sizeof out, "%s", encoded(tok, text, strlen(text), special));
        expect_ok("detokenizer", qt_detokenizer_open(&back, tok, dir, &err), &err);
        qt_detokenizer_close(back);
        qt_tokenizer_close(tok);
    }
    free(copy);
    fixture_remove(dir);
    return out;
}

#define TEKKEN(config, vocab)                                                                      \
    "{'config':{'pattern':'[a-z]+|.'," config "},'special_tokens':[{'rank':1,'token_str':'<s>'}]," \
    "'vocab':[" vocab "]}"
#define SIZES "'default_num_special_tokens':3,'default_vocab_size':6"
#define ABC                                                                                        \
    "{'rank':0,'token_bytes':'YQ=='},{'rank':1,'token_bytes':'Yg=='},"                             \
    "{'rank':2,'token_bytes':'YWI='}"

static void test_ranks(void **state)
{
    static const struct {
        const char *name, *data, *result;
    } rows[] = {
        {"tekken.json", TEKKEN(SIZES, ABC), "1 5 3"},
        {"tekken.json", TEKKEN("'default_vocab_size':6", ABC), "default_num_special_tokens"},
        {"tekken.json", TEKKEN("'default_num_special_tokens':6,'default_vocab_size':6", ABC),
         "not possible"},
        {"tekken.json", TEKKEN("'default_num_special_tokens':1,'default_vocab_size':6", ABC),
         "fewer than 5 tokens"},
        {"tekken.json", TEKKEN(SIZES, ABC ",{'rank':2,'token_bytes':'?'}"), "1 5 3"},
        {"tekken.json", TEKKEN(SIZES, "{'rank':0,'token_bytes':'?'},1,2"), "not base64"},
        {"tekken.json", TEKKEN(SIZES, "{'rank':1,'token_bytes':'YQ=='},1,2"), "another rank"},
        {"tekken.json", "{'config':3}", "no \"config\" object"},
        {"tekken.json", "[]", "no \"config\" object"},
        {"tokenizer.model", "YQ== 0\nYg== 1\nYWI= 2\n", "3 2 0"},
        {"tiktoken.model", "YQ== 0\r\nYg== 1\r\nYWI= 2", "3 2 0"},
        {"qwen.tiktoken", "YQ== 0\nYg== 1\nYWI= 2\n", "2 0"},
        {"tokenizer.model", "YQ== 0\nYQ== 1\n", "appears twice"},
        {"tokenizer.model", "YQ== 0\nYg== x\n", "line 'Yg== x' is not a token"},
        {"tokenizer.model", "YQ== 99999999999\n", "no valid rank"},
        {"tokenizer.model", "YQ==\n", "line 'YQ==' is not a token"},
        {"tokenizer.model", "?? 0\n", "not base64"},
        {"tokenizer.model", "", "no tokens"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *got =
            encoded_file(rows[i].name, rows[i].data, strlen(rows[i].data), "aba", true);
        if (!strstr(got, rows[i].result))
            fail_msg("%s %s: %s", rows[i].name, rows[i].data, got);
    }
}

/* A piece of less than 100 bytes with a score that is -n / 2 and a type. */
static size_t add_piece(char *out, const char *text, int n, int type)
{
    const float score = -(float)n / 2;
    const size_t size = strlen(text);
    char *p = out;
    *p++ = 0x0a;
    *p++ = (char)(size + 9);
    *p++ = 0x0a;
    *p++ = (char)size;
    memcpy(p, text, size);
    p += size;
    *p++ = 0x15;
    memcpy(p, &score, 4);
    p += 4;
    *p++ = 0x18;
    *p++ = (char)type;
    return (size_t)(p - out);
}

static void test_sentencepiece(void **state)
{
    static const struct {
        const char *more; /* fields behind the pieces */
        size_t size;
        const char *text, *ids;
    } rows[] = {
        {"", 0, " ab  ab", "3 3"},              /* Unigram, prefix, spaces collapse */
        {"\x12\x02\x18\x02", 4, "ab a", "3 6"}, /* BPE */
        {"\x1a\x02\x18\x00", 4, "ab", "4 5"},   /* no prefix */
        {"\x1a\x02\x20\x00", 4, " ab", "2 3"},  /* spaces stay */
        {"\x12\x02\x18\x03", 4, "ab", "words or characters"},
        {"\x12\x03\xc0\x01\x01", 5, "ab", "spaces at the end"},
        {"\x1a\x02\x28\x00", 4, "ab", "not escaped"},
        {"\x1a\x09\x18", 3, "ab", "damaged"},
        {"\x0b", 1, "ab", "damaged"},
        {"\x0a\x03\x0a\x01\xff", 5, "ab", "not UTF-8"},
        {"\x1a\x03\x12\x01\x00", 5, "ab", "precompiled_charsmap is damaged"},
    };
    char data[512];
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        size_t size = add_piece(data, "<unk>", 0, 2);
        size += add_piece(data + size, "<s>", 0, 3);
        size += add_piece(data + size, MARK, 5, 1);
        size += add_piece(data + size, MARK "ab", 6, 1);
        size += add_piece(data + size, "a", 7, 1);
        size += add_piece(data + size, "b", 8, 1);
        size += add_piece(data + size, MARK "a", 20, 1);
        memcpy(data + size, rows[i].more, rows[i].size);
        const char *got =
            encoded_file("tokenizer.model", data, size + rows[i].size, rows[i].text, false);
        if (!strstr(got, rows[i].ids))
            fail_msg("row %zu: %s", i, got);
    }
}

static void test_missing_file(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    assert_int_equal(qt_tokenizer_open(&tok, dir, &err), QT_E_INPUT);
    assert_string_equal(err.file, dir);
    assert_non_null(strstr(err.reason, "there is no tokenizer"));
    fixture_remove(dir);
}

static void test_invalid_text(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    static const struct {
        const char *text;
        size_t size;
        const char *reason;
    } rows[] = {
        {"ab\xff", 3, "not UTF-8 at byte 2"},           {"a\xc3", 2, "not UTF-8 at byte 1"},
        {"\xed\xa0\x80", 3, "not UTF-8 at byte 0"},     {"\xc0\x80", 2, "not UTF-8 at byte 0"},
        {"\xf4\x90\x80\x80", 4, "not UTF-8 at byte 0"}, {"a\x80", 2, "not UTF-8 at byte 1"},
    };
    expect_ok("open", open_json(&tok, dir, PLAIN(ASCII), &err), &err);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_non_null(strstr(encoded(tok, rows[i].text, rows[i].size, false), rows[i].reason));
    assert_string_equal(encoded(tok, "a\0b", 3, false), "7"); /* NUL is an ordinary character */
    qt_tokenizer_close(tok);
    fixture_remove(dir);
}

/* Sixty doublings of the text must not exhaust memory. */
static void test_expansion(void **state)
{
    (void)state;
    char *dir = fixture_dir(), json[16384] = "{'model':{" ASCII "},'normalizer':{'type':"
                                             "'Sequence','normalizers':[";
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    for (int i = 0; i < 60; i++)
        strcat(json, "{'type':'Replace','pattern':{'String':'a'},'content':'aa'},");
    strcpy(json + strlen(json) - 1, "]}}");
    expect_ok("open", open_json(&tok, dir, json, &err), &err);
    assert_non_null(strstr(encoded(tok, "a", 1, false), "expand the text"));
    qt_tokenizer_close(tok);
    fixture_remove(dir);
}

/* ---- long words ----------------------------------------------------------------------------- */

/* A quadratic algorithm would take hours. 2n "a" encode to n "aa"; combining marks are sorted. */
static void test_long_word(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    char *dir = fixture_dir(), *text = malloc(2 * N);
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    uint32_t *ids;
    size_t count;
    assert_non_null(text);
    memset(text, 'a', 2 * N);
    expect_ok("open", open_json(&tok, dir, NORMALIZED("{'type':'NFC'}"), &err), &err);
    expect_ok("encode", qt_tokenizer_encode(&ids, &count, tok, text, 2 * N, false, &err), &err);
    assert_int_equal(count, N);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(ids[i], 15);
    qt_free(ids);
    for (size_t i = 0; i < 2 * N; i += 4)
        memcpy(text + i, "\xcc\x81\xcc\xa3", 4);
    expect_ok("encode", qt_tokenizer_encode(&ids, &count, tok, text, 2 * N, false, &err), &err);
    assert_int_equal(count, 0);
    qt_free(ids);
    qt_tokenizer_close(tok);
    free(text);
    fixture_remove(dir);
}

/* A long word is encoded in parts: the ids are those of the whole. */
static void test_parts(void **state)
{
    /* Random words of these; the first ones are periodic, so that no place is a boundary at first
     * sight. */
    static const char *const alphabets[] = {
        "a",
        "ab",
        "ha",
        "=-",
        "abcdefghijklmnopqrstuvwxyz",
        "eatnoris",
        "\xc4\xa0th",
        "0123456789",
        "\xe4\xb8\x80xy",
    };
    enum { N = 700000 };
    struct qt_err err = {0};
    json_t *root;
    struct qt_bpe bpe;
    char *word = malloc(N + 8);
    uint64_t seed = 11;
    (void)state;
    assert_non_null(word);
    expect_ok("json", qt_json_load(&root, "examples/nano-llama/tokenizer.json", 1 << 24, &err),
              &err);
    expect_ok("bpe",
              qt_bpe_load(&bpe, json_object_get(root, "model"), &(struct qt_ids){0}, "f", &err),
              &err);
    for (size_t a = 0; a < sizeof alphabets / sizeof *alphabets; a++) {
        const char *letters = alphabets[a];
        const size_t count = strlen(letters);
        size_t size = 0;
        while (size < N) {
            const size_t at = count < 4 ? size % count : qt_splitmix64(&seed) % count;
            if ((letters[at] & 0xc0) == 0x80)
                continue; /* inside of a character */
            word[size++] = letters[at];
            for (size_t i = at + 1; i < count && (letters[i] & 0xc0) == 0x80; i++)
                word[size++] = letters[i];
        }
        struct qt_bpe whole = bpe;
        whole.longest = SIZE_MAX;
        struct qt_bpe_work work = {0}, work_whole = {0};
        struct qt_ids ids = {0}, want = {0};
        expect_ok("parts", qt_bpe_encode(&ids, &work, &bpe, word, size, &err), &err);
        expect_ok("whole", qt_bpe_encode(&want, &work_whole, &whole, word, size, &err), &err);
        assert_int_equal(ids.count, want.count);
        assert_memory_equal(ids.data, want.data, ids.count * sizeof *ids.data);
        assert_true(work.symbol_capacity < N); /* it was in parts */
        qt_free(ids.data);
        qt_free(want.data);
        qt_bpe_work_free(&work);
        qt_bpe_work_free(&work_whole);
    }
    qt_bpe_free(&bpe);
    json_decref(root);
    free(word);
}

static bool stop_tokenizing(void)
{
    return true;
}

static void test_options(void **state)
{
    static const char text[] = "Once upon a time there was a girl.";
    struct qt_encode_options opt = {.special = true, .most = 3};
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    uint32_t *all, *ids;
    size_t count, first;
    (void)state;
    expect_ok("open", qt_tokenizer_open(&tok, "examples/nano-llama", &err), &err);
    expect_ok("all", qt_tokenizer_encode(&all, &count, tok, text, sizeof text - 1, true, &err),
              &err);
    expect_ok("first",
              qt_tokenizer_encode_most(&ids, &first, tok, text, sizeof text - 1, &opt, &err), &err);
    assert_int_equal(first, 3);
    assert_true(count > first);
    assert_memory_equal(ids, all, first * sizeof *ids);
    qt_free(ids);
    qt_free(all);
    opt.interrupted = stop_tokenizing;
    expect_error("stop",
                 qt_tokenizer_encode_most(&ids, &first, tok, text, sizeof text - 1, &opt, &err),
                 QT_E_INTERRUPTED, "interrupted while text was tokenized", &err);
    qt_tokenizer_close(tok);
}

/* ---- allocation failures -------------------------------------------------------------------- */

static const char everything[] =
    TOKENIZER(TOKEN(16, "<x>", "") "," TOKEN(17, "EF", ",'normalized':true"),
              "{'type':'Sequence','normalizers':[{'type':'NFC'},{'type':'Lowercase'},{'type':"
              "'Replace','pattern':{'Regex':'d+'},'content':'c'}]}",
              "{'type':'Sequence','pretokenizers':[{'type':'Split','pattern':{'Regex':'\\\\s+'},"
              "'behavior':'MergedWithNext'},{'type':'ByteLevel','add_prefix_space':true}]}",
              "{'type':'TemplateProcessing','single':[{'SpecialToken':{'id':'B'}},{'Sequence':"
              "{'id':'A'}}],'special_tokens':{'B':{'ids':[5]}}}",
              ASCII);

static void test_allocation_failures(void **state)
{
    (void)state;
    char *dir = fixture_dir();
    static const char text[] = "ab<x> e\xcc\x81\xcc\xa3 EF abcdef abc";
    long n = 0;
    int rc;
    write_json(dir, "tokenizer.json", everything);
    do {
        struct qt_tokenizer *tok;
        struct qt_err err = {0};
        uint32_t *ids = NULL;
        size_t count;
        qt_mem_fail_after(n++);
        rc = qt_tokenizer_open(&tok, dir, &err);
        if (rc == QT_OK) {
            rc = qt_tokenizer_encode(&ids, &count, tok, text, sizeof text - 1, true, &err);
            qt_tokenizer_close(tok);
            qt_free(ids);
        }
        qt_mem_fail_after(-1);
        if (rc < 0)
            expect_error("allocation", rc, QT_E_RESOURCE, "", &err);
    } while (rc < 0 && n < 10000);
    assert_int_equal(rc, QT_OK);
    assert_true(n > 100);
    fixture_remove(dir);
}

/* ---- shared checkpoints --------------------------------------------------------------------- */

/* innocents.u16 was encoded in pieces of 200 lines; a newline was added to the last line. */
static void test_shared_ids(void **state)
{
    (void)state;
    const char *found = fixture_shared("checkpoints/tiny-llama/innocents.u16");
    if (!found)
        skip();
    char dir[512], *text;
    struct qt_tokenizer *tok;
    struct qt_err err = {0};
    uint32_t *want, *ids;
    size_t want_count, size, count, at = 0;
    expect_ok("ids", qt_token_ids_read(&want, &want_count, found, 0, &err), &err);
    snprintf(dir, sizeof dir, "%s", found);
    *strrchr(dir, '/') = '\0';
    expect_ok("open", qt_tokenizer_open(&tok, dir, &err), &err);
    assert_int_equal(qt_tokenizer_vocab(tok), 4096);
    expect_ok(
        "text",
        qt_file_read(&text, &size, fixture_shared("data/prose.eval.txt"), (size_t)1 << 30, &err),
        &err);
    assert_int_not_equal(text[size - 1], '\n');
    text[size++] = '\n'; /* over the terminating NUL */
    for (size_t start = 0, end; start < size; start = end) {
        end = start;
        for (int line = 0; line < 200 && end < size; line++)
            end = (size_t)((char *)memchr(text + end, '\n', size - end) - text) + 1;
        expect_ok("encode",
                  qt_tokenizer_encode(&ids, &count, tok, text + start, end - start, false, &err),
                  &err);
        assert_true(count <= want_count - at);
        assert_memory_equal(ids, want + at, count * sizeof *ids);
        at += count;
        qt_free(ids);
    }
    assert_int_equal(at, want_count);
    qt_free(text);
    qt_free(want);
    qt_tokenizer_close(tok);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_patterns_refused),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_match_limit),
        cmocka_unit_test(test_byte_level),
        cmocka_unit_test(test_add_bos),
        cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_missing_file),
        cmocka_unit_test(test_invalid_text),
        cmocka_unit_test(test_expansion),
        cmocka_unit_test(test_long_word),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_shared_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
