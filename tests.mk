# Tests, checkers, formatting. docs/design/tests.md says what each covers. Included by Makefile.

UNIT    := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))
FUZZ    := $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
REPLAY  := $(FUZZ:%=$(B)/tests/replay_%)
ROBUST  := $(B)/tests/mutants $(B)/tests/damage
BENCH   := $(patsubst tests/bench/%.c,$(B)/tests/%,$(wildcard tests/bench/bench_*.c))

# ---- building ----------------------------------------------------------------------------------

$(B)/tests/%: $(B)/tests/unit/%.o $(B)/tests/unit/filter.o $(B)/libqtool.a | $(B)/pkg.libs
	$(LINK) -lcmocka $(WRAP)

$(B)/tests/test_gpu_backend: $(patsubst %,$(B)/kernels/gpu/%.o,backend host_ops product factor round \
    arrays choices grad panels halves attention status) $(B)/tests/unit/gpu_missing.o

# These tests replace functions to count calls or to make them fail.
comma := ,
$(B)/tests/test_torch: WRAP := -Wl,--wrap=qt_crc32
$(B)/tests/test_faults: WRAP := $(addprefix -Wl$(comma)--wrap=,open read pread pwrite fsync fdatasync \
    rename ftruncate fallocate mkdir unlinkat fstat lstat opendir mmap \
    malloc realloc aligned_alloc)

$(B)/tests/%: $(B)/tests/bench/%.o $(B)/libqtool.a | $(B)/pkg.libs
	$(LINK)
$(B)/tests/%: $(B)/tests/oracle/%.o $(B)/libqtool.a | $(B)/pkg.libs
	$(LINK)
$(B)/tests/%: $(B)/tests/large/%.o $(B)/libqtool.a | $(B)/pkg.libs
	$(LINK)

# A fuzz target with libFuzzer's main (make fuzz), and with one that runs the files it is given.
FUZZ_COMMON := $(patsubst %,$(B)/tests/fuzz/%.o,fuzz quantized invariants)
# Targets whose inputs carry checksums: a checksum that is always right lets changes get past it.
$(addprefix $(B)/tests/,$(foreach t,qcal journal,fuzz_$t replay_$t)): WRAP := -Wl,--wrap=qt_crc32

$(B)/tests/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(FUZZ_COMMON) $(B)/libqtool.a | $(B)/pkg.libs
	$(LINK) -fsanitize=fuzzer $(WRAP)
$(B)/tests/replay_%: $(B)/tests/fuzz/fuzz_%.o $(B)/tests/fuzz/replay.o $(FUZZ_COMMON) $(B)/libqtool.a \
    | $(B)/pkg.libs
	$(LINK) $(WRAP)

# Programs that run qtool on files made wrong on purpose.
$(ROBUST): $(B)/tests/%: $(patsubst %,$(B)/tests/robust/%.o,robust mutate) $(B)/tests/robust/%.o | $(B)/pkg.libs
	$(LINK)

# ---- testing -----------------------------------------------------------------------------------

tests: $(B)/qtool $(UNIT) $(REPLAY) $(ROBUST) $(BENCH)
test: $(B)/qtool $(UNIT) $(REPLAY) $(ROBUST)
	@tests/run.sh $(B)

# The same tests under AddressSanitizer and UndefinedBehaviorSanitizer, without GPU code.
check:
	@$(MAKE) B=$(B)/check NVCC= CFLAGS="$(SAN)" test

# Under ThreadSanitizer, with LLVM's OpenMP: archer tells it about the barriers of parallel loops,
# which it cannot see in any other OpenMP. Waiting threads sleep: some tests have more threads than
# there are cores. This and check-valgrind: all tests, or ONLY="test_pack cli".
ARCHER = $(shell clang -print-resource-dir 2>/dev/null)/../../libarcher.so
check-threads:
	@[ -e $(ARCHER) ] || { echo "SKIP: no clang with libarcher.so (Debian: clang, libomp-dev)"; exit 77; }
	@OMP_TOOL_LIBRARIES=$(abspath $(ARCHER)) OMP_WAIT_POLICY=passive \
	    TSAN_OPTIONS="ignore_noninstrumented_modules=1 die_after_fork=0" $(MAKE) B=$(B)/threads \
	    CC=clang NVCC= CFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=thread" test

# Unit tests and fuzz inputs under valgrind: uninitialised reads and leaks.
check-valgrind: $(UNIT) $(REPLAY)
	@command -v valgrind >/dev/null || { echo "SKIP: no valgrind"; exit 77; }
	@RUNNER="valgrind -q --error-exitcode=9 --suppressions=tests/valgrind.supp --leak-check=full --show-leak-kinds=definite \
	    --errors-for-leak-kinds=definite" tests/run.sh $(B)

# Lines that the tests run, by file, into $(B)/coverage/report. Threads may lose counts of each other,
# but never all.
coverage:
	@$(MAKE) B=$(B)/coverage NVCC= CFLAGS="-O1 -g --coverage" test
	@tests/coverage.sh $(B)/coverage

# The same container from both compilers, any number of threads, every instruction set path.
determinism: $(B)/qtool
	@$(MAKE) B=$(B)/clang CC=clang NVCC= CFLAGS="$(CFLAGS)" $(B)/clang/qtool
	@tests/determinism.sh $(B)/qtool $(B)/clang/qtool

# All fuzz targets, or TARGETS="torch npy", for SECONDS each, from tests/fuzz/corpus and tests/bad.
# Findings go to $(B)/fuzz/found; new inputs that reach new code go to $(B)/fuzz/corpus.
TARGETS ?= $(FUZZ)
SECONDS ?= 60
fuzz:
	@$(MAKE) B=$(B)/fuzz CC=clang NVCC= CFLAGS="$(SAN) -fsanitize=fuzzer-no-link" \
	    $(TARGETS:%=$(B)/fuzz/tests/fuzz_%)
	@tests/fuzz/run.sh $(B)/fuzz $(SECONDS) $(TARGETS)

# Installs into $(B), and builds a C and a C++ program against the installed kernel library.
test-install:
	tests/gpu/install.sh $(B)

# Quantizes a checkpoint of 6 GB; takes 10 GB of disk and some minutes.
test-large: $(B)/qtool $(B)/tests/make_checkpoint $(B)/tests/peak
	tests/large/memory.sh $(B)
	tests/large/plan_memory.sh $(B) ../shared/checkpoints/tiny-llama ../shared/data/prose.calib.txt
	tests/large/plan_time.sh $(B) ../shared/checkpoints/tiny-llama ../shared/data/prose.calib.txt

# Containers of every scheme on 1 to 4 ranks, with shared memory and over TCP; takes some minutes.
test-ranks: $(B)/qtool
	tests/large/ranks.sh $(B)/qtool ../shared/checkpoints/tiny-llama ../shared/data/prose.calib.txt

bench: $(BENCH)
	@for b in $(BENCH); do echo "== $${b##*/}"; $$b || exit 1; done

# Other implementations as the reference; Python packages go to $(B)/venv.
oracle-tokenizer: $(B)/tests/tokenize
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) tokenizer
oracle: $(B)/qtool $(B)/tests/tokenize $(B)/tests/test_model $(B)/tests/test_backward
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) tokenizer families chat pack kv qcal sources model exports gptqmodel mlx gguf vllm python
# GGUF exports in llama.cpp, which takes long to compile.
oracle-llama: $(B)/qtool
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) llama.cpp

# A report of the example model in headless Chromium (Debian: chromium).
browser: $(B)/qtool
	@tests/browser/run.sh $(B)

# ---- formatting --------------------------------------------------------------------------------

SOURCES := $(shell find $(FOLDERS) cli tests -name '*.[ch]' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
fmt:
	@clang-format -i $(SOURCES)
fmt-check:
	@clang-format --dry-run -Werror $(SOURCES)
tidy: $(B)/pkg.cflags
	@echo $(filter-out tests/%,$(filter %.c,$(SOURCES))) | xargs -n 8 -P 2 sh -c \
	    'clang-tidy --quiet "$$@" -- $(QFLAGS) -DQT_ISA=generic' tidy

.PHONY: tests test check check-threads check-valgrind coverage determinism fuzz test-install \
        test-large test-ranks bench oracle oracle-llama oracle-tokenizer browser \
        fmt fmt-check tidy
