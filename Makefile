# qtool. Targets:
#   all (default)  deps  deps-dev  demo  tests  test  check  test-gpu  sanitize-gpu  test-install  test-large
#   check-threads  check-valgrind  coverage  determinism  fuzz
#   oracle  oracle-tokenizer  oracle-registers  bench  kernels
#   fmt  fmt-check  tidy  install  install-kernels  clean
# Everything built goes to $(B). CUDA parts are built when nvcc is found (NVCC= to leave them out).

MAKEFLAGS += --no-builtin-rules
# All processors, unless -j says otherwise. (`make clean all` is one after the other.)
ifeq ($(MAKELEVEL)$(filter clean,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(shell nproc)
endif
B       ?= build
PREFIX  ?= /usr/local
LIBDIR  ?= $(PREFIX)/lib
CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
CFLAGS  ?= -O3 -g
NVCC    ?= $(shell command -v nvcc 2>/dev/null)
PYTHON  ?= python3

PKGS    := openblas lapacke jansson libpcre2-8 libutf8proc zlib nettle
# Asked once, when first needed: `make deps all` installs the packages first.
PKG_INC  = $(eval PKG_INC := $$(shell pkg-config --cflags $(PKGS)))$(PKG_INC)
LIBS     = $(eval LIBS := $$(shell pkg-config --libs $(PKGS)) -lm)$(LIBS)
WARN    := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
# No contraction: a * b + c must round the same on every instruction set. No trapping math: nobody
# reads the exception flags, and with them GCC turns no comparison into a select, which makes the
# loops over cpu_exp six times slower on AVX2. Neither changes a result.
QFLAGS   = -std=c11 -D_GNU_SOURCE -I. -fopenmp -ffp-contract=off -fno-trapping-math $(WARN) \
           -MMD -MP $(PKG_INC)
SAN     := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined \
           -fno-sanitize-recover=undefined

# These are built once per instruction set and chosen at run time.
ISA_SRC := pack/rowops.c pack/mix24_fit.c
ISA_generic :=
ISA_avx2    := -mavx2
ISA_avx512  := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
ISAS    := generic $(if $(filter x86_64,$(shell uname -m)),avx2 avx512)

FOLDERS := base formats calib hessian pack kernels verify
LIB_SRC := $(filter-out $(ISA_SRC) kernels/gpu_%,$(wildcard $(FOLDERS:%=%/*.c)))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o) $(foreach i,$(ISAS),$(ISA_SRC:%.c=$(B)/%.$i.o))
# qt_gpu_open: linked beside the library, which is the same with and without nvcc.
GPU_OBJ := $(patsubst %,$(B)/kernels/gpu_%.o,$(if $(NVCC),copy cuda cublas product backend math transfer,none)) \
           $(if $(NVCC),$(B)/libqtool_kernels.a)
CLI_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard cli/*.c))
UNIT    := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))
FUZZ    := $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
BENCH   := $(patsubst tests/bench/%.c,$(B)/tests/%,$(wildcard tests/bench/bench_*.c))
SOURCES := $(wildcard $(FOLDERS:%=%/*.[ch]) cli/*.[ch] tests/unit/*.[ch] tests/bench/*.[ch] \
           tests/fuzz/*.[ch] tests/oracle/*.c tests/large/*.c tests/gpu/*.[ch] tests/gpu/*.cu* \
           $(foreach e,h cc cu cuh,kernels/cuda/*.$e))

all: $(B)/qtool

# ---- building ----------------------------------------------------------------------------------

# `make deps all`: packages first.
FIRST   := $(filter deps,$(MAKECMDGOALS))

ifeq ($(NVCC),)
NO_NVCC := @echo "nvcc not found: building without GPU parts"
endif

# Commands are long: shown with V=1.
Q        = $(if $(V),,@echo "  $(1) $@"; )
COMPILE  = $(call Q,CC)$(CC) $(QFLAGS) $(CFLAGS) -c -o $@ $<
LINK     = $(call Q,LINK)$(CC) $(CFLAGS) -fopenmp -o $@ $(filter %.o %.a,$^) $(LIBS)

$(B)/qtool: $(CLI_OBJ) $(GPU_OBJ) $(B)/libqtool.a $(B)/gpu_parts
	$(NO_NVCC)
	$(LINK) $(CUDA_RT)

# What of the GPU is linked: when nvcc comes or goes, qtool is linked anew.
$(B)/gpu_parts: always
	@mkdir -p $(@D)
	@echo '$(GPU_OBJ)' | cmp -s - $@ || echo '$(GPU_OBJ)' >$@

$(B)/libqtool.a: $(LIB_OBJ)
	@rm -f $@
	$(call Q,AR)$(AR) rcs $@ $^

$(B)/%.o: %.c | $(FIRST)
	@mkdir -p $(@D)
	$(COMPILE)

$(B)/pack/rowops.%.o: pack/rowops.c | $(FIRST)
	@mkdir -p $(@D)
	$(COMPILE) $(ISA_$*) -DQT_ISA=$*

# Its vectors are wider than some instruction sets pass them, but none leaves the file.
$(B)/pack/mix24_fit.%.o: pack/mix24_fit.c | $(FIRST)
	@mkdir -p $(@D)
	$(COMPILE) $(ISA_$*) -Wno-psabi -DQT_ISA=$*

$(B)/tests/%: $(B)/tests/unit/%.o $(B)/libqtool.a
	$(LINK) -lcmocka $(WRAP)

comma := ,
$(B)/tests/test_gpu_backend: $(patsubst %,$(B)/%.o,kernels/gpu_backend kernels/gpu_product \
    tests/unit/gpu_missing)

# Counted there.
$(B)/tests/test_torch: WRAP := -Wl,--wrap=qt_crc32

$(B)/tests/test_faults: WRAP := $(addprefix -Wl$(comma)--wrap=,open read pread pwrite fsync fdatasync \
    rename ftruncate fallocate mkdir unlinkat fstat lstat opendir mmap \
    malloc realloc aligned_alloc)

$(B)/tests/%: $(B)/tests/bench/%.o $(B)/libqtool.a
	$(LINK)

$(B)/tests/%: $(B)/tests/oracle/%.o $(B)/libqtool.a
	$(LINK)

$(B)/tests/%: $(B)/tests/large/%.o $(B)/libqtool.a
	$(LINK)

# A fuzz target with libFuzzer's main (make fuzz), and with one that runs the files it is given.
FUZZ_COMMON := $(patsubst %,$(B)/tests/fuzz/%.o,fuzz quantized invariants)
# Targets whose inputs carry checksums: a checksum that is always right lets changes get past it.
$(addprefix $(B)/tests/,$(foreach t,qcal journal,fuzz_$t replay_$t)): WRAP := -Wl,--wrap=qt_crc32

$(B)/tests/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(FUZZ_COMMON) $(B)/libqtool.a
	$(LINK) -fsanitize=fuzzer $(WRAP)

$(B)/tests/replay_%: $(B)/tests/fuzz/fuzz_%.o $(B)/tests/fuzz/replay.o $(FUZZ_COMMON) $(B)/libqtool.a
	$(LINK) $(WRAP)

# ---- CUDA --------------------------------------------------------------------------------------
#
# kernels/cuda: libqtool_kernels, machine code for Ampere (8.0, which 8.6 and 8.9 run too) and Hopper,
# and PTX for what comes after. Not part of libqtool, and needs nothing of it.

ifneq ($(NVCC),)
CUDA_HOME ?= $(abspath $(dir $(shell command -v $(NVCC)))..)
CUDA_ARCH ?= -gencode arch=compute_80,code=[sm_80,compute_80] \
             -gencode arch=compute_90a,code=sm_90a
# Of Hopper alone; for older devices alone, as Hopper has others for what they do; what Hopper seldom
# runs; the others are compiled for either. The latter three are one compilation each, as nvcc takes
# two seconds for a file before it comes to a kernel. What takes longest goes first, so that no core
# waits for it at the end.
CUDA_HOPPER := tile_group tile_fpx w4ax_hopper mix24_hopper skinny
CUDA_older  := stream mma_tile w4ax_stream_older
CUDA_seldom := int4_zero dequantize mix24_dequantize
CUDA_either := $(filter-out $(CUDA_HOPPER) $(CUDA_older) $(CUDA_seldom),$(sort $(patsubst kernels/cuda/%.cu,%,$(wildcard kernels/cuda/*.cu))))
CUDA_OBJ    := $(patsubst %,$(B)/kernels/cuda/%.o,tile_group either older $(filter-out tile_group,$(CUDA_HOPPER)) seldom) \
               $(patsubst %.cc,$(B)/%.o,$(sort $(wildcard kernels/cuda/*.cc)))
CUDA_GROUPS := older seldom either
CUDA_LIBS := $(B)/libqtool_kernels.a $(B)/libqtool_kernels.so
CUDA_RT   := -L$(CUDA_HOME)/lib64 -lcudart_static -lm -ldl -lrt -lpthread
SONAME    := libqtool_kernels.so.0

all: kernels
kernels: $(CUDA_LIBS)

$(B)/libqtool_kernels.a: $(CUDA_OBJ)
	@rm -f $@
	$(call Q,AR)$(AR) rcs $@ $^

# Only what the public headers declare is visible.
$(B)/libqtool_kernels.so: $(CUDA_OBJ) kernels/cuda/exports.map
	$(call Q,LINK)$(CC) -shared -o $@ $(CUDA_OBJ) -Wl,-soname,$(SONAME) \
	    -Wl,--version-script=kernels/cuda/exports.map $(CUDA_RT)

# Instructions of Hopper alone; other devices get the other kernels.
$(CUDA_HOPPER:%=$(B)/kernels/cuda/%.o) $(B)/tests/gpu/bench_tensor.o: CUDA_ARCH := \
    -gencode arch=compute_90a,code=sm_90a
# Where Hopper is to run kernels for older devices (`--compute 8.0`), the driver compiles their PTX.
$(B)/kernels/cuda/older.o: CUDA_ARCH := -gencode arch=compute_80,code=[sm_80,compute_80]
$(B)/kernels/cuda/seldom.o: CUDA_ARCH := -gencode arch=compute_80,code=[sm_80,sm_90,compute_80]

# C++ here is for templates: nothing of its run time is wanted by what links the library. (The
# statics are those of nvcc's launch stubs, and constant.)
# (Machine code compressed for size would be 5 MB instead of 23, and 20 seconds more.)
CUDA_HOST := -fPIC -fno-exceptions -fno-rtti -fno-threadsafe-statics
# (To include C++17's <cmath>, which nvcc always does, takes it 0.4 s a file. Of C++17 there is
# `if constexpr` here, in C++14 an extension of both compilers.)
CUDA_STD  := -std=c++14 -diag-suppress 2912 -Xcompiler -Wno-c++17-extensions
CUDA_CXX = $(NVCC) -O3 $(CUDA_STD) -I. $(CUDA_HOST:%=-Xcompiler %) -MMD -MP -c -o $@ $<
$(B)/%.o: %.cu
	@mkdir -p $(@D)
	$(call Q,NVCC)$(CUDA_CXX) $(CUDA_ARCH)
$(B)/kernels/cuda/%.o: $(B)/kernels/cuda/%.cu
	$(call Q,NVCC)$(CUDA_CXX) $(CUDA_ARCH)
$(CUDA_GROUPS:%=$(B)/kernels/cuda/%.cu): always
	@mkdir -p $(@D)
	@printf '#include "kernels/cuda/%s.cu"\n' $(CUDA_$(basename $(@F))) >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# The host's part.
$(B)/%.o: %.cc
	@mkdir -p $(@D)
	$(call Q,CXX)$(CXX) -O2 -std=c++14 -Wall -I. -isystem $(CUDA_HOME)/include $(CUDA_HOST) -MMD -MP -c -o $@ $<

$(B)/kernels/gpu_copy.o $(B)/kernels/gpu_cuda.o $(B)/tests/gpu/%.o: QFLAGS += -isystem $(CUDA_HOME)/include
$(B)/tests/gpu/%: $(B)/tests/gpu/%.o $(GPU_OBJ) $(B)/libqtool.a
	$(LINK) $(CUDA_RT)
$(B)/tests/gpu/test_mix24: $(B)/tests/gpu/mix24_matrix.o
$(B)/tests/gpu/test_kernels $(B)/tests/gpu/test_mix24 $(B)/tests/gpu/test_kv4 $(B)/tests/gpu/test_w4ax \
    $(B)/tests/gpu/test_backend $(B)/tests/gpu/bench_w4ax: $(B)/tests/gpu/reference.o
# A device that is not there, in place of the run time.
$(B)/tests/gpu/test_launch $(B)/tests/gpu/test_refuse: %: %.o $(B)/tests/gpu/pretend.o $(B)/libqtool_kernels.a
	$(LINK)
$(B)/tests/gpu/bench_w4ax: CUDA_RT += -lcublas -lstdc++
$(B)/tests/gpu/bench_tensor: CUDA_RT += -lstdc++

# What programs need that launch the kernels: the library, its header, and
# `pkg-config [--static] qtool-kernels`.
install-kernels: kernels
	install -d "$(DESTDIR)$(PREFIX)/include"
	for h in qtool_kernels.h qtool_kv4.h qtool_w4ax.h; do \
	    sed 's|"kernels/|"|' kernels/$$h >"$(DESTDIR)$(PREFIX)/include/$$h" || exit 1; done
	install -D -m 644 $(B)/libqtool_kernels.a "$(DESTDIR)$(LIBDIR)/libqtool_kernels.a"
	install -D -m 755 $(B)/libqtool_kernels.so "$(DESTDIR)$(LIBDIR)/$(SONAME)"
	ln -sf $(SONAME) "$(DESTDIR)$(LIBDIR)/libqtool_kernels.so"
	install -d "$(DESTDIR)$(LIBDIR)/pkgconfig"
	sed -e "s|@prefix@|$(PREFIX)|" -e "s|@libdir@|$(LIBDIR)|" -e "s|@cuda@|$(CUDA_HOME)|" \
	    kernels/cuda/qtool-kernels.pc.in >"$(DESTDIR)$(LIBDIR)/pkgconfig/qtool-kernels.pc"

# test_plan, test_launch and test_refuse need no GPU, and wgmma_registers reads machine code; the others say SKIP
# where there is no GPU. CUDA_FORCE_PTX_JIT: the kernels that devices of 8.x and 12.x run.
test-gpu: $(addprefix $(B)/tests/gpu/,test_plan test_launch test_refuse test_backend test_kernels test_mix24 test_kv4 test_w4ax sweep) \
          $(B)/libqtool_kernels.a $(B)/qtool
	$(B)/tests/gpu/test_plan
	$(B)/tests/gpu/test_launch
	$(B)/tests/gpu/test_refuse
	$(B)/tests/gpu/test_backend
	$(PYTHON) tests/gpu/wgmma_registers.py $(B)/libqtool_kernels.a
	$(B)/tests/gpu/test_kernels
	$(B)/tests/gpu/test_mix24
	$(B)/tests/gpu/test_kv4
	$(B)/tests/gpu/test_w4ax
	for t in kernels mix24 kv4 w4ax; do \
	    CUDA_FORCE_PTX_JIT=1 $(B)/tests/gpu/test_$$t 7 quick || exit 1; done
	tests/gpu/commands.sh $(B)/qtool

# The machine code, by NVIDIA's cuobjdump, which goes to $(B)/venv where there is none.
oracle-registers: $(B)/libqtool_kernels.a
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) registers

# Needs a GPU, and some minutes.
sanitize-gpu: $(addprefix $(B)/tests/gpu/,test_backend test_kernels test_mix24 test_kv4 test_w4ax)
	for tool in memcheck synccheck initcheck racecheck; do for t in $^; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $$t 7 quick || exit 1; done; done
else
kernels test-gpu sanitize-gpu oracle-registers install-kernels:
	@echo "SKIP: nvcc not found, nothing of the GPU is built"
endif

# ---- what is needed ----------------------------------------------------------------------------

DEBS    := gcc libc6-dev make pkg-config libopenblas-dev liblapacke-dev zlib1g-dev libjansson-dev \
           libpcre2-dev libutf8proc-dev nettle-dev libcmocka-dev
# For fmt, tidy and builds with clang (libomp: its OpenMP), and for tests that say SKIP without; not needed to build or
# test.
DEV_DEBS := clang libomp-dev clang-format clang-tidy valgrind python3-jsonschema zsh

deps-dev: | $(filter deps,$(MAKECMDGOALS))
deps: NEEDED = $(DEBS)
deps-dev: NEEDED = $(DEV_DEBS)
deps deps-dev:
	@command -v apt-get >/dev/null || { echo "not a Debian: install what these hold: $(NEEDED)"; \
	    pkg-config --exists $(PKGS) cmocka; exit; }; \
	missing=$$(for p in $(NEEDED); do dpkg-query -Wf '$${Status}' $$p 2>/dev/null | \
	    grep -q 'ok installed' || echo $$p; done); \
	[ -n "$$missing" ] || { echo "nothing is missing"; exit 0; }; \
	sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	$$sudo apt-get update -q && $$sudo env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qy --no-install-recommends $$missing

# ---- trying and testing ------------------------------------------------------------------------

demo: $(B)/qtool
	examples/demo.sh $(B)/qtool $(B)/demo

REPLAY  := $(FUZZ:%=$(B)/tests/replay_%)
tests: $(B)/qtool $(UNIT) $(REPLAY) $(BENCH)
test: $(B)/qtool $(UNIT) $(REPLAY)
	@tests/run.sh $(B)

# The same tests under AddressSanitizer and UndefinedBehaviorSanitizer, without GPU parts.
check:
	@$(MAKE) B=$(B)/check NVCC= CFLAGS="$(SAN)" test

# Under ThreadSanitizer, with LLVM's OpenMP: archer tells it about the barriers of parallel loops, which
# it cannot see in any other OpenMP. Threads that wait sleep: some tests have more than there are cores.
# This and check-valgrind: all tests, or ONLY="test_pack cli".
ARCHER = $(shell clang -print-resource-dir 2>/dev/null)/../../libarcher.so
check-threads:
	@[ -e $(ARCHER) ] || { echo "SKIP: no clang with libarcher.so (Debian: clang, libomp-dev)"; exit 77; }
	@OMP_TOOL_LIBRARIES=$(abspath $(ARCHER)) OMP_WAIT_POLICY=passive \
	    TSAN_OPTIONS="ignore_noninstrumented_modules=1 die_after_fork=0" $(MAKE) B=$(B)/threads \
	    CC=clang NVCC= CFLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=thread" test

# Unit tests and fuzz inputs under valgrind: reads of what was never written, and leaks.
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
# What they find is left in $(B)/fuzz/found; new inputs that reach new code in $(B)/fuzz/corpus.
TARGETS ?= $(FUZZ)
SECONDS ?= 60
fuzz:
	@$(MAKE) B=$(B)/fuzz CC=clang NVCC= CFLAGS="$(SAN) -fsanitize=fuzzer-no-link" \
	    $(TARGETS:%=$(B)/fuzz/tests/fuzz_%)
	@tests/fuzz/run.sh $(B)/fuzz $(SECONDS) $(TARGETS)

# Quantizes a checkpoint of 6 GB; takes 10 GB of disk and some minutes.
test-large: $(B)/qtool $(B)/tests/make_checkpoint $(B)/tests/peak
	tests/large/memory.sh $(B)

bench: $(BENCH)
	@for b in $(BENCH); do echo "== $${b##*/}"; $$b || exit 1; done

# Other people's implementations as the judge; Python packages go to $(B)/venv.
oracle-tokenizer: $(B)/tests/tokenize
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) tokenizer
oracle: $(B)/tests/tokenize $(B)/tests/test_model $(B)/tests/test_backward
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) tokenizer pack model

# ---- tidiness ----------------------------------------------------------------------------------

fmt:
	@clang-format -i $(SOURCES)
fmt-check:
	@clang-format --dry-run -Werror $(SOURCES)
tidy:
	@echo $(filter-out tests/unit/%,$(filter %.c,$(SOURCES))) | xargs -n 8 -P 2 sh -c \
	    'clang-tidy --quiet "$$@" -- $(QFLAGS) -DQT_ISA=generic' tidy

install: all
	install -D -m 755 $(B)/qtool "$(DESTDIR)$(PREFIX)/bin/qtool"
	install -d "$(DESTDIR)$(PREFIX)/share/doc/qtool/docs"
	install -m 644 README.md LICENSE "$(DESTDIR)$(PREFIX)/share/doc/qtool"
	install -m 644 docs/*.md docs/*.tsv docs/json.schema.json "$(DESTDIR)$(PREFIX)/share/doc/qtool/docs"
	install -d "$(DESTDIR)$(PREFIX)/share/man/man1" \
	    "$(DESTDIR)$(PREFIX)/share/bash-completion/completions" \
	    "$(DESTDIR)$(PREFIX)/share/zsh/site-functions"
	$(B)/qtool manual >"$(DESTDIR)$(PREFIX)/share/man/man1/qtool.1"
	sed -i "s|/usr/local/share/doc|$(PREFIX)/share/doc|" "$(DESTDIR)$(PREFIX)/share/man/man1/qtool.1"
	$(B)/qtool completion bash >"$(DESTDIR)$(PREFIX)/share/bash-completion/completions/qtool"
	$(B)/qtool completion zsh >"$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_qtool"
	$(if $(NVCC),@$(MAKE) --no-print-directory install-kernels)

# Installs into $(B), and builds a C and a C++ program against it where there are kernels.
test-install:
	tests/gpu/install.sh $(B)

clean:
	rm -rf $(B)

.PHONY: all always kernels sanitize-gpu deps deps-dev demo tests test check check-threads check-valgrind coverage \
        determinism fuzz test-gpu test-install test-large bench oracle oracle-tokenizer oracle-registers fmt \
        fmt-check tidy install install-kernels clean
.SECONDARY:
-include $(shell find $(B) -name '*.d' 2>/dev/null)
