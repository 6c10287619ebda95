#!/usr/bin/env python3
"""Ids of qtool's tokenizer against those of the `tokenizers` package.

usage: tokenizer.py [PROGRAM [NAME...]]
       PROGRAM: build/tests/tokenize (tests/oracle/tokenize.c); NAME: only these tokenizers, or "files"

Tokenizers are trained here, on text made here (and ../shared/data where present), and changed into
every kind that qtool reads; then two kinds of text are encoded by both: more than 1 MB at once, and
thousands of short strings put together from awkward characters. Every id must be equal.

Only characters of Unicode 3.2 and some blocks of emoji occur: the libraries involved know different
later versions of Unicode. Exit status: 0 equal, 1 different, 77 skipped.
"""
import base64
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

try:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
except ImportError:
    print("SKIP tests/oracle/tokenizer.py: the Python package `tokenizers` is missing")
    sys.exit(77)

try:
    import sentencepiece as spm
except ImportError:
    spm = None
    print("note: without the Python package sentencepiece")
try:
    import tiktoken
except ImportError:
    tiktoken = None
    print("note: without the Python package tiktoken")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SHARED = os.environ.get("QT_SHARED", os.path.join(ROOT, "..", "shared"))

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
         r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
         r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]

# ---- texts ---------------------------------------------------------------------------------------

SPACES = [chr(c) for c in (9, 10, 11, 12, 13, 0x20, 0x85, 0xA0, 0x1680, 0x180E, 0x2000, 0x2003,
                           0x200A, 0x200B, 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF)]
MARKS = [chr(c) for c in (0x300, 0x301, 0x308, 0x30A, 0x323, 0x327, 0x338, 0x345, 0x5B0, 0x5BC,
                          0x64B, 0x651, 0x93C, 0x94D, 0x3099, 0x309A, 0x1D165, 0x20DD)]
ODD = list("ſKİıßŉǰﬁﬀﬆΣςŒẞǅ½²³¹¼Ⅷ①Ⓐⓐ𝟘𝔸٣३๓〇ªºµ_‿'’") + ["\u200c", "\u200d"]
EMOJI = [chr(c) for c in (*range(0x1F600, 0x1F640), *range(0x1F300, 0x1F320), 0x2764, 0xFE0F,
                          0x1F468, 0x1F469, 0x1F466, 0x1F1E9, 0x1F1EA, 0x1F3FD, 0x200D)]
CJK = "的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家十用发天如然作方成者多日都三小军二无同么经法当起与好看学进种将还分此心前面又定见只主没公从知全工实使情明性力理美给今かなカタひらがな한국어조선글"
WORDS = ("the of and to in a is that it was for on as with his he be at by this had not are but "
         "from or have an they which one you were her all she there would their we him been has "
         "when who will more no if out so said what up its about into than them can only other "
         "time new some could these two may then do first any my now such like our over man me "
         "even most made after also did many off before must well back through years where much "
         "don't isn't we're I've you'll he'd I'm O'Neil DON'T WE'LL naïve façade Größe ").split()
CODE = """static int f%d(const char *s, size_t n)\r\n{\n\tfor (size_t i = 0; i < n; i++)\n\t\tif (s[i] == '\\n' && x%d->y[%d] != 0x%x)
            return -1; /* %d%% */\n    return printf("%%s: %%d\\n", s, %d);\n}\n\n\n"""


def unicode32():
    old = unicodedata.ucd_3_2_0
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and c != 0x1E
            and old.category(chr(c)) not in ("Cn", "Cs")]


def words(rng, n):
    out = []
    for _ in range(n):
        w = rng.choice(WORDS)
        if rng.random() < 0.1:
            w = w.capitalize()
        if rng.random() < 0.03:
            w = str(rng.randrange(10 ** rng.randrange(1, 9)))
        out.append(w + rng.choice(["", "", "", "", ",", ".", ";", "!?", "\n", "\n\n", "  "]))
    return " ".join(out)


def mixed_text(everything):
    rng = random.Random(1)
    parts = []
    for i in range(700):
        parts.append(words(rng, 120))
        parts.append(CODE % tuple(rng.randrange(10 ** 6) for _ in range(6)))
        parts.append("".join(rng.choice(CJK) for _ in range(60)) + "。")
        parts.append("".join(rng.choice(EMOJI + [" "]) for _ in range(12)))
        parts.append("".join(rng.choice(SPACES) for _ in range(rng.randrange(8))))
        parts.append("".join(rng.choice("aeoucsy가각ば") + rng.choice(MARKS) * rng.randrange(2)
                             + rng.choice(MARKS) for _ in range(8)))
        parts.append("".join(chr(rng.randrange(1, 0x1E)) for _ in range(6)) + "\x7f\x9f")
        parts.append("".join(rng.choice(everything) for _ in range(40)))
        parts.append("".join(rng.choice(ODD + ["'s", "'ſ", "'LL", " "]) for _ in range(8)))
        parts.append(rng.choice(["", " ", "\n"]))
    text = "".join(parts)
    for name in ("prose.eval.txt", "wikitext2.test.txt"):
        path = os.path.join(SHARED, "data", name)
        if os.path.exists(path):
            with open(path, encoding="utf-8", newline="") as f:
                text += f.read()[:250000]
        else:
            print("note: without", path)
    text += "x" * 30000 + " " * 30000 + "x" + "\n" * 20000 + "é" * 10000 + "\u0301\u0323" * 1000
    assert len(text.encode()) > 1 << 20 and "\x1e" not in text
    return text


def short_texts(everything, extra, seed, count=1500):
    rng = random.Random(seed)
    pool = (SPACES + [" "] * 8 + ["\n"] * 3 + MARKS[:6] + ODD + EMOJI[:4] + list(CJK[:6]) +
            list("abeist'\"-.,!#12 9AZ_▁") + ["'s", "'re", " the", "an", "ing", "</s>", "▁▁"])
    texts = [""]
    while len(texts) < count:
        n = rng.choice([1, 2, 3, 5, 8, 13, 30])
        kinds = [pool, pool, extra or pool, everything]
        texts.append("".join(rng.choice(rng.choices(kinds, [6, 4, 6, 1])[0]) for _ in range(n)))
    return texts


# ---- tokenizers ----------------------------------------------------------------------------------

def trained(pre, text, vocab, byte_level=True):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre
    tok.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=vocab, show_progress=False, special_tokens=["<unk>"],
                                    initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
                                    if byte_level else []))
    return json.loads(tok.to_str())


def split_json(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence_json(*items):
    return {"type": "Sequence", "pretokenizers": list(items)}


def bytes_json(prefix=False, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True,
            "use_regex": regex}


def changed(base, **sections):
    out = json.loads(json.dumps(base))
    for key, value in sections.items():
        if key.startswith("model_"):
            out["model"][key[6:]] = value
        else:
            out[key] = value
    return out


def with_added(base, tokens):
    """tokens: (content, flags); ids as the library gives them."""
    out = json.loads(json.dumps(base))
    vocab = out["model"]["vocab"]
    next_id = len(vocab)
    out["added_tokens"] = []
    for content, flags in tokens:
        if content in vocab:
            number = vocab[content]
        else:
            number, next_id = next_id, next_id + 1
        out["added_tokens"].append({"id": number, "content": content, "single_word": False,
                                    "lstrip": False, "rstrip": False, "normalized": False,
                                    "special": False, **flags})
    return out


def flag_tokens():
    """One token for every combination of flags, and some that overlap or share prefixes."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    out = []
    for i, flags in enumerate(itertools.product((False, True), repeat=5)):
        out.append(("<t%d>" % i if i % 3 else "tok%d" % i, dict(zip(names, flags))))
    out += [("<t1>x", {}), ("<t1>xyz", {"normalized": True}), ("an", {"single_word": True}),
            ("\n\n", {}), ("   ", {"normalized": True}), ("é", {"normalized": True}),
            ("ſ", {"single_word": True, "lstrip": True, "normalized": True}), ("的一", {})]
    return out


def sentencepiece(base, full_bytes=True):
    """A model in the manner of Llama 2 from one trained with Metaspace."""
    out = json.loads(json.dumps(base))
    vocab = {"<unk>": 0}
    for b in range(256):
        if full_bytes or b < 0x80 or b % 3:
            vocab["<0x%02X>" % b] = len(vocab)
    for token in sorted(out["model"]["vocab"], key=out["model"]["vocab"].get):
        vocab.setdefault(token, len(vocab))
    vocab.setdefault("▁", len(vocab))
    out["model"].update(vocab=vocab, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    out["added_tokens"] = []
    out["pre_tokenizer"] = None
    out["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    return out


def template(*items):
    pieces = [{"Sequence": {"id": "A", "type_id": 0}} if i == "A" else
              {"SpecialToken": {"id": i, "type_id": 0}} for i in items]
    specials = {i: {"id": i, "ids": [3, 4] if i == "two" else [5], "tokens": ["x", "y"][:2 if i == "two" else 1]}
                for i in items if i != "A"}
    return {"type": "TemplateProcessing", "single": pieces,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": specials}


def norm(kind, **options):
    return {"type": kind, **options}


def byte_level_cases(text):
    flags = flag_tokens()
    visible = [f for f in flags if f[0].strip()]  # Strip leaves nothing of the others
    gpt2 = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), text, 6000)
    llama3 = trained(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), text, 9000)
    yield "gpt2", gpt2
    yield "gpt2-prefix-space", changed(gpt2, pre_tokenizer=bytes_json(True, True))
    yield "gpt2-string-merges", changed(gpt2, model_merges=[" ".join(m) for m in gpt2["model"]["merges"]])
    yield "gpt2-flags", with_added(gpt2, flags)
    yield "llama3", changed(llama3, model_ignore_merges=True, post_processor={
        "type": "Sequence", "processors": [bytes_json(True, True), template("<s>", "A")]})
    # Words of the vocabulary whose merges are gone: only ignore_merges still finds them.
    yield "llama3-ignore-merges", changed(llama3, model_ignore_merges=True,
                                          model_merges=llama3["model"]["merges"][::2][:500])
    yield "llama3-flags", with_added(llama3, flags)
    qwen2 = changed(llama3, normalizer=norm("NFC"),
                    pre_tokenizer=sequence_json(split_json(QWEN2), bytes_json()))
    yield "qwen2", qwen2
    yield "qwen2-flags", with_added(qwen2, flags)
    yield "o200k", changed(llama3, pre_tokenizer=sequence_json(split_json(O200K), bytes_json()))
    yield "cl100k", changed(llama3, pre_tokenizer=sequence_json(
        split_json(CL100K, "Removed", True), bytes_json()))
    yield "deepseek", changed(llama3, pre_tokenizer=sequence_json(
        *[split_json(p) for p in DEEPSEEK], bytes_json()))
    yield "starcoder", changed(gpt2, pre_tokenizer=sequence_json(
        {"type": "Digits", "individual_digits": True}, bytes_json(False, True)))
    yield "digits-in-runs", changed(gpt2, pre_tokenizer=sequence_json(
        {"type": "Digits", "individual_digits": False}, bytes_json(True, True)))
    yield "falcon-order", changed(gpt2, pre_tokenizer=sequence_json(
        bytes_json(False, True), {"type": "Digits", "individual_digits": False},
        split_json("[0-9][0-9][0-9]")))
    yield "whitespace", changed(gpt2, pre_tokenizer=sequence_json({"type": "Whitespace"}, bytes_json()))
    yield "whitespace-split", changed(gpt2, pre_tokenizer=sequence_json(
        {"type": "WhitespaceSplit"}, bytes_json()))
    for form in ("NFD", "NFKC", "NFKD", "Lowercase"):
        yield form, with_added(changed(gpt2, normalizer=norm(form)), flags)
    for left, right in ((True, False), (False, True), (True, True)):
        yield "strip-%d%d" % (left, right), with_added(changed(gpt2, normalizer=norm(
            "Strip", strip_left=left, strip_right=right)), visible)
    yield "replace-regex", changed(gpt2, normalizer={"type": "Sequence", "normalizers": [
        norm("Replace", pattern={"Regex": r"\s+|^'|\w$|[\u0041-\x43]"}, content="~"),
        norm("Replace", pattern={"String": ".."}, content="")]})
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            for pattern, kind in ((r"\w", "Regex"), (r"[^\S\n]|\d*", "Regex"), (" ", "String")):
                name = "split-%s-%d-%s" % (behavior, invert, pattern)
                yield name, changed(gpt2, pre_tokenizer=sequence_json(
                    split_json(pattern, behavior, invert, kind), bytes_json()))
    yield "template", changed(gpt2, post_processor=template("two", "<s>", "A", "</s>"))


def sentencepiece_cases(text):
    flags = flag_tokens()
    visible = [f for f in flags if f[0].strip()]
    base = trained(pre_tokenizers.Metaspace(), text, 6000, byte_level=False)
    llama2 = sentencepiece(base)
    yield "llama2", llama2
    yield "llama2-template", changed(llama2, post_processor=template("<s>", "A"))
    yield "llama2-flags", with_added(llama2, flags)
    yield "llama2-some-bytes", sentencepiece(base, full_bytes=False)
    yield "llama2-no-fuse", changed(llama2, model_byte_fallback=False, model_fuse_unk=False)
    yield "llama2-fuse", changed(llama2, model_byte_fallback=False)
    yield "llama2-some-bytes-no-fuse", changed(sentencepiece(base, False), model_fuse_unk=False)
    yield "llama2-no-unk", changed(llama2, model_byte_fallback=False, model_unk_token=None)
    # A merge across the mark: the text may no longer be cut there.
    crossed = sentencepiece(base)
    crossed["model"]["vocab"]["e▁"] = len(crossed["model"]["vocab"])
    crossed["model"]["merges"].insert(0, ["e", "▁"])
    yield "llama2-crossed", crossed
    for scheme in ("always", "first", "never"):
        for split in (False, True):
            mistral = changed(llama2, normalizer=None, pre_tokenizer={
                "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
            yield "metaspace-%s-%d" % (scheme, split), mistral
            yield "metaspace-%s-%d-flags" % (scheme, split), with_added(mistral, flags)
            yield "metaspace-%s-%d-strip" % (scheme, split), with_added(changed(
                mistral, normalizer=norm("Strip", strip_left=True, strip_right=False)), visible)
    yield "metaspace-old", changed(llama2, normalizer=None, pre_tokenizer={
        "type": "Metaspace", "replacement": "▁", "add_prefix_space": True})
    yield "gemma", changed(llama2, normalizer=norm("Replace", pattern={"String": " "}, content="▁"),
                           pre_tokenizer=split_json(" ", "MergedWithPrevious", False, "String"))


BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
UPPER, LOWER = (r"[%s\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" % c for c in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
KIMI = (r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?%s*%s+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?%s+%s*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        % (UPPER, LOWER, UPPER, LOWER))


def train(model, trainer, pre, text, normalizer=None):
    tok = Tokenizer(model)
    tok.pre_tokenizer = pre
    if normalizer:
        tok.normalizer = normalizer
    tok.train_from_iterator(text.split("\n"), trainer)
    return json.loads(tok.to_str())


def charsmap():
    """The normalization tables of SentencePiece's nmt_nfkc, in base64."""
    with tempfile.TemporaryDirectory() as tmp:
        model = sentencepiece_model(tmp, ["the quick brown fox"] * 50, vocab_size=30)
    return base64.b64encode(field(field(model, 3), 2)).decode()


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def field(data, number):
    """The bytes of a field of a protocol buffer."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == 2:
            size, at = varint(data, at)
            if tag >> 3 == number:
                return data[at:at + size]
            at += size
        elif tag & 7 == 0:
            at = varint(data, at)[1]
        else:
            at += 4 if tag & 7 == 5 else 8
    raise KeyError(number)


def sentencepiece_model(directory, lines, **options):
    path = os.path.join(directory, "trained")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=path, minloglevel=2, hard_vocab_limit=False,
        **options)
    with open(path + ".model", "rb") as f:
        return f.read()


def other_cases(text):
    flags = flag_tokens()
    gpt2 = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), text, 6000)
    for name, pattern in (("bloom", BLOOM), ("kimi", KIMI), ("nested", r"[a-z[A-C0-9]&&[^m-p[xy]]]+"),
                          ("negated", r"[^\s[a-f]&&[^0-9]]+")):
        yield name, changed(gpt2, pre_tokenizer=sequence_json(split_json(pattern), bytes_json()))
    clip = train(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"), trainers.BpeTrainer(
        vocab_size=4000, show_progress=False, end_of_word_suffix="</w>", special_tokens=["<unk>"]),
        pre_tokenizers.Whitespace(), text)
    yield "clip", changed(clip, normalizer=norm("Lowercase"))
    yield "clip-roberta", changed(clip, post_processor={
        "type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 3], "trim_offsets": True,
        "add_prefix_space": False})
    prefix = train(models.BPE(continuing_subword_prefix="##", unk_token="<unk>"), trainers.BpeTrainer(
        vocab_size=3000, show_progress=False, continuing_subword_prefix="##",
        special_tokens=["<unk>"]), pre_tokenizers.Whitespace(), text)
    yield "bpe-prefix", prefix
    bert = train(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(
        vocab_size=5000, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"]),
        pre_tokenizers.BertPreTokenizer(), text, normalizers.BertNormalizer())
    yield "bert", changed(bert, post_processor={
        "type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]})
    yield "bert-flags", with_added(bert, flags)
    for key in ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"):
        yield "bert-no-" + key, changed(bert, normalizer=dict(bert["normalizer"], **{key: False}))
    yield "word-level", changed(bert, model={
        "type": "WordLevel", "vocab": bert["model"]["vocab"], "unk_token": "[UNK]"})
    unigram = train(models.Unigram(), trainers.UnigramTrainer(
        vocab_size=4000, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]),
        pre_tokenizers.Metaspace(), "".join(c for c in text if c < "\u0180" or c in CJK[::2]))
    yield "unigram", unigram
    yield "unigram-whole", changed(unigram, pre_tokenizer=None)
    yield "unigram-old", changed(unigram, model={k: v for k, v in unigram["model"].items()
                                                 if k not in ("type", "byte_fallback")})
    some = unigram["model"]["vocab"] + [["<0x%02X>" % b, -9.0] for b in range(256)]
    yield "unigram-bytes", changed(unigram, model_vocab=some, model_byte_fallback=True)
    if spm:
        table = norm("Precompiled", precompiled_charsmap=charsmap())
        yield "unigram-charsmap", changed(unigram, normalizer=table)
        yield "xlm-r", changed(unigram, normalizer={"type": "Sequence", "normalizers": [
            table, norm("Replace", pattern={"Regex": " {2,}"}, content=" ")]},
            pre_tokenizer=sequence_json({"type": "WhitespaceSplit"}, {
                "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}))


# ---- other files than tokenizer.json -------------------------------------------------------------

def compare_ids(program, directory, name, texts, want, special=False):
    path = os.path.join(directory, "text")
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write("\x1e".join(texts))
    run = subprocess.run([program, directory, path] + ["special"] * special, capture_output=True,
                         text=True)
    got = parse(run.stdout)
    bad = [i for i in range(len(texts)) if i >= len(got) or got[i] != want[i]]
    if run.returncode or bad:
        print("FAIL %s: %s %d of %d texts differ" % (name, run.stderr.strip(), len(bad), len(texts)))
        for i in sorted(bad, key=lambda k: len(texts[k]))[:3]:
            print("    ", ascii(texts[i][:60]), "want", want[i][:12],
                  "got", got[i][:12] if i < len(got) else None)
    return not bad and run.returncode == 0


def compare_text(program, directory, name, ids, want):
    path = os.path.join(directory, "ids")
    with open(path, "w", encoding="utf-8") as f:
        f.write("".join("".join("%d\n" % i for i in one) + "\n" for one in ids))
    run = subprocess.run([program, directory, path, "decode"], capture_output=True)
    got = run.stdout.decode("utf-8", "surrogateescape").split("\x1e")[:-1]
    bad = [i for i in range(len(ids)) if i >= len(got) or got[i] != want[i]]
    for i in bad[:3]:
        print("FAIL decoding %s:" % name, ids[i][:12], ascii(want[i]),
              ascii(got[i]) if i < len(got) else None)
    return not bad


def sentencepiece_files(program, texts, text):
    """tokenizer.model against the sentencepiece package."""
    failed = count = 0
    some = "".join(c for c in text[:400000] if c < "\u0180" or c in CJK[::2])
    lines = [line[:400] for line in some.split("\n") if line.strip()][:2500]
    for name, options in (("unigram", {}), ("bpe", dict(model_type="bpe")),
                          ("llama", dict(model_type="bpe", byte_fallback=True, split_digits=True,
                                         normalization_rule_name="identity",
                                         remove_extra_whitespaces=False)),
                          ("unigram-bytes", dict(byte_fallback=True, add_dummy_prefix=False))):
        with tempfile.TemporaryDirectory() as directory:
            model = sentencepiece_model(directory, lines, vocab_size=2000, character_coverage=0.9995,
                                        **options)
            with open(os.path.join(directory, "tokenizer.model"), "wb") as f:
                f.write(model)
            sp = spm.SentencePieceProcessor(model_proto=model)
            clean = [t for t in texts if not any(c in t for c in ("<s>", "</s>", "<unk>"))]
            want = [sp.encode(t) for t in clean]
            failed += not compare_ids(program, directory, "sentencepiece " + name, clean, want)
            few = [w for w in want if 0 < len(w) < 100]
            few = [w for w in few if sp.unk_id() not in w and "\x1e" not in sp.decode(w)]
            failed += not compare_text(program, directory, "sentencepiece " + name, few,
                                       [sp.decode(w) for w in few])
            count += 2
    return failed, count


def tiktoken_files(program, texts, text):
    """tiktoken.model and tekken.json against the tiktoken package."""
    tok = trained(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), text, 8000)
    chars = {c: b for b, c in enumerate(byte_chars())}
    tokens = sorted((t for t in tok["model"]["vocab"] if t != "<unk>"),
                    key=lambda t: (len(t) > 1, tok["model"]["vocab"][t]))
    tokens = [bytes(chars[c] for c in t) for t in tokens]
    ranks = {t: i for i, t in enumerate(tokens)}
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, pattern, config in (
                ("llama3", LLAMA3, None),
                ("kimi", KIMI, {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {
                    str(len(tokens) + 3): {"content": "[BOS]", "special": True}}})):
            with open(os.path.join(directory, "tiktoken.model"), "wb") as f:
                for t in tokens:
                    f.write(base64.b64encode(t) + b" %d\n" % ranks[t])
            with open(os.path.join(directory, "tokenizer_config.json"), "w") as f:
                json.dump(config or {}, f)
            reference = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens={})
            want = [reference.encode_ordinary(t) for t in texts]
            failed += not compare_ids(program, directory, "tiktoken " + name, texts, want)
            failed += not compare_text(program, directory, "tiktoken " + name, want[-900:], [
                reference.decode(w) for w in want[-900:]])
        os.rename(os.path.join(directory, "tiktoken.model"),
                  os.path.join(directory, "qwen.tiktoken"))
        names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        names += [f"<|extra_{i}|>" for i in range(205)]
        reference = tiktoken.Encoding(
            "x", pat_str=QWEN2, mergeable_ranks=ranks,
            special_tokens={s: len(tokens) + i for i, s in enumerate(names)})
        mixed = texts + ["<|im_start|>user\ne\u0301<|im_end|><|extra_204|>"]
        want = [reference.encode(unicodedata.normalize("NFC", t), allowed_special="all")
                for t in mixed]
        failed += not compare_ids(program, directory, "qwen.tiktoken", mixed, want)
        os.remove(os.path.join(directory, "qwen.tiktoken"))
        with open(os.path.join(directory, "tekken.json"), "w") as f:
            json.dump({"config": {"pattern": O200K, "default_vocab_size": len(tokens) + 20,
                                  "default_num_special_tokens": 30},
                       "special_tokens": [{"rank": i, "token_str": s, "is_control": True} for i, s in
                                          enumerate(("<unk>", "<s>", "</s>", "[INST]"))],
                       "vocab": [{"rank": i, "token_bytes": base64.b64encode(t).decode()}
                                 for i, t in enumerate(tokens)]}, f)
        ranks = {t: i for t, i in ranks.items() if i < len(tokens) - 10}
        reference = tiktoken.Encoding("x", pat_str=O200K, mergeable_ranks=ranks, special_tokens={})
        clean = [t for t in texts if not any(s in t for s in ("<s>", "</s>", "<unk>", "[INST]"))]
        want = [[1] + [30 + i for i in reference.encode_ordinary(t)] for t in clean]
        failed += not compare_ids(program, directory, "tekken", clean, want, special=True)
    return failed, 6


def byte_chars():
    """GPT-2's characters for the bytes 0 to 255."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(rest)) for b in range(256)]


# These encode the whole text, the others its beginning: the package is not fast.
WHOLE = ("gpt2", "gpt2-flags", "llama3", "llama3-flags", "qwen2", "qwen2-flags", "deepseek", "NFKC",
         "llama2", "llama2-flags", "llama2-some-bytes", "metaspace-always-1",
         "metaspace-first-0-flags", "kimi", "clip", "bert", "unigram", "xlm-r", "unigram-bytes")


# ---- comparing -----------------------------------------------------------------------------------

def parse(output):
    records, current = [], []
    for line in output.split("\n")[:-1]:
        if line:
            current.append(int(line))
        else:
            records.append(current)
            current = []
    return records


def compare(program, directory, name, tokenizer, texts):
    with open(os.path.join(directory, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    reference = Tokenizer.from_str(json.dumps(tokenizer))
    special = tokenizer["post_processor"] is not None
    want = [e.ids for e in reference.encode_batch(texts, add_special_tokens=special)]
    path = os.path.join(directory, "text")
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write("\x1e".join(texts))
    run = subprocess.run([program, directory, path] + ["special"] * special, capture_output=True,
                         text=True)
    if run.returncode != 0:
        print("FAIL %s: %s" % (name, run.stderr.strip()))
        return False
    got = parse(run.stdout)
    bad = [i for i in range(len(texts)) if i >= len(got) or got[i] != want[i]]
    if not bad:
        return True
    i = min(bad, key=lambda k: len(texts[k]))
    have = got[i] if i < len(got) else []
    at = next((k for k, (a, b) in enumerate(zip(have, want[i])) if a != b), min(len(have), len(want[i])))
    print("FAIL %s: %d of %d texts differ; %s: at id %d of %d, want %s, got %s" % (
        name, len(bad), len(texts), ascii(texts[i][:60]), at, len(want[i]),
        [reference.id_to_token(k) for k in want[i][at:at + 8]],
        [reference.id_to_token(k) for k in have[at:at + 8]]))
    return False


# ---- decoding ------------------------------------------------------------------------------------

SENTENCEPIECE = {"type": "Sequence", "decoders": [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
    {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}


def decoders(text):
    special = [("<s>", {"special": True}), ("<|a b|>", {}), ("é▁", {}), ("<t>", {"special": True})]
    gpt2 = with_added(trained(pre_tokenizers.ByteLevel(add_prefix_space=False), text, 3000), special)
    base = trained(pre_tokenizers.Metaspace(), text, 3000, byte_level=False)
    llama2 = with_added(sentencepiece(base), special)
    yield "ByteLevel", changed(gpt2, decoder=bytes_json())
    yield "none", changed(gpt2, decoder=None)
    yield "llama2", changed(llama2, decoder=SENTENCEPIECE)
    yield "gemma", changed(llama2, decoder={"type": "Sequence",
                                            "decoders": SENTENCEPIECE["decoders"][:3]})
    bert = train(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(
        vocab_size=2000, show_progress=False, special_tokens=["[UNK]"]),
        pre_tokenizers.BertPreTokenizer(), text[:100000], normalizers.BertNormalizer())
    yield "WordPiece", changed(bert, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    yield "WordPiece without clean-up", changed(
        bert, decoder={"type": "WordPiece", "prefix": "##", "cleanup": False})
    clip = train(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"), trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, end_of_word_suffix="</w>", special_tokens=["<unk>"]),
        pre_tokenizers.Whitespace(), text[:100000])
    yield "BPEDecoder", changed(clip, decoder={"type": "BPEDecoder", "suffix": "</w>"})
    for start, stop in ((2, 0), (0, 1)):  # the package fails if both cut the same character
        yield "strip %d %d" % (start, stop), changed(llama2, decoder={
            "type": "Sequence", "decoders": [{"type": "Strip", "content": "e", "start": start,
                                              "stop": stop}, {"type": "Fuse"}]})
    for scheme in ("always", "first", "never"):
        yield "Metaspace " + scheme, changed(llama2, decoder={
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True})


def compare_decoder(program, directory, name, tokenizer, texts):
    with open(os.path.join(directory, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    reference = Tokenizer.from_str(json.dumps(tokenizer))
    rng = random.Random(3)
    size = reference.get_vocab_size()
    lists = [e.ids for e in reference.encode_batch(texts) if e.ids]
    lists += [[rng.randrange(size + 3) for _ in range(rng.randrange(1, 12))] for _ in range(3000)]
    lists += [[rng.randrange(min(size, 300)) for _ in range(rng.randrange(1, 12))] for _ in range(3000)]
    lists = [ids for ids in lists if "\x1e" not in reference.decode(ids)]
    path = os.path.join(directory, "ids")
    with open(path, "w", encoding="utf-8") as f:
        f.write("".join("".join("%d\n" % i for i in ids) + "\n" for ids in lists))
    run = subprocess.run([program, directory, path, "decode"], capture_output=True)
    got = run.stdout.decode("utf-8", "surrogateescape").split("\x1e")[:-1]
    want = [reference.decode(ids) for ids in lists]
    bad = [i for i in range(len(lists)) if i >= len(got) or got[i] != want[i]]
    if run.returncode or bad:
        print("FAIL decoder %s: %s %d of %d texts differ" % (name, run.stderr.decode(), len(bad), len(lists)))
        for i in bad[:3]:
            print([reference.id_to_token(k) for k in lists[i]], ascii(want[i]),
                  ascii(got[i]) if i < len(got) else None)
    return not bad and run.returncode == 0


def main():
    only = set(sys.argv[2:])
    program = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build", "tests", "tokenize")
    everything = unicode32()
    text = mixed_text(everything)
    extra = [content for content, _ in flag_tokens()] + [" "]
    failed = count = 0
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, tokenizer) in enumerate(itertools.chain(byte_level_cases(text),
                                                                   sentencepiece_cases(text),
                                                                   other_cases(text))):
            if only and name not in only:
                continue
            added = extra if tokenizer["added_tokens"] else None
            whole = [text if name in WHOLE else text[:60000]]
            ok = compare(program, directory, name, tokenizer,
                         whole + short_texts(everything, added, number))
            failed += not ok
            count += 1
        for name, tokenizer in decoders(text):
            if only and "decoders" not in only:
                continue
            texts = [t.replace("\x1e", "") for t in short_texts(everything, None, 1)]
            failed += not compare_decoder(program, directory, "decoder " + name, tokenizer, texts)
            count += 1
    for package, files in ((spm, sentencepiece_files), (tiktoken, tiktoken_files)):
        if package and (not only or "files" in only):
            bad, more = files(program, [text[:300000]] + short_texts(everything, None, 7), text)
            failed, count = failed + bad, count + more
    print("%s: %d tokenizers, %d bytes at once, %d with differences" % (
        "FAIL" if failed else "ok", count, len(text.encode()), failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
