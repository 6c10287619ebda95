# qtool: building, installing. cuda.mk has the CUDA kernels, tests.mk the tests and checkers.
# Targets:
#   all (default)  kernels  install  install-kernels  deps  deps-dev  demo  charts  dist  deb  clean
#   tests.mk: test  check  check-threads  check-valgrind  coverage  determinism  fuzz  bench  oracle
#             browser  test-gpu  sanitize-gpu  test-install  test-large  test-ranks  fmt  fmt-check
#             tidy
# Output goes to $(B). NVCC= builds without CUDA. V=1 shows commands.

MAKEFLAGS += --no-builtin-rules
# One job per processor, unless -j says otherwise. (`make clean all` runs one after the other.)
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
WARN    := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
# No contraction: a * b + c must round the same on every instruction set. No trapping math: nobody
# reads the exception flags, and with them GCC turns no comparison into a select, which makes the
# loops over cpu_exp six times slower on AVX2. Neither changes a result.
QFLAGS   = -std=c11 -D_GNU_SOURCE -I. -fopenmp -ffp-contract=off -fno-trapping-math $(WARN) \
           -MMD -MP $$(cat $(B)/pkg.cflags)
SAN     := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined \
           -fno-sanitize-recover=undefined

# Compiled once per instruction set; the program chooses at run time.
ISA_SRC := pack/schemes/rowops.c pack/schemes/mix24/fit.c
ISA_generic :=
ISA_avx2    := -mavx2
ISA_avx512  := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
ISAS    := generic $(if $(filter x86_64,$(shell uname -m)),avx2 avx512)

# Goals that do not compile the CUDA kernels: they link the kernel library if an earlier `make`
# built it, and are without CUDA otherwise.
QUICK   := deps deps-dev demo test tests
GPU     := $(and $(NVCC),$(or $(filter-out $(QUICK),$(or $(MAKECMDGOALS),all)),\
             $(wildcard $(B)/libqtool_kernels.a)))

FOLDERS := base formats model calib hessian pack kernels verify
ALL_SRC := $(sort $(shell find $(FOLDERS) cli -name '*.c'))
LIB_SRC := $(filter-out $(ISA_SRC) kernels/gpu/% cli/%,$(ALL_SRC))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o) $(foreach i,$(ISAS),$(ISA_SRC:%.c=$(B)/%.$i.o))
# qt_gpu_open is linked beside the library, which is the same with and without CUDA.
GPU_SRC := $(if $(GPU),$(filter-out %/none.c,$(wildcard kernels/gpu/*.c kernels/gpu/*.cu)),kernels/gpu/none.c)
GPU_OBJ := $(addprefix $(B)/,$(addsuffix .o,$(basename $(sort $(GPU_SRC))))) \
           $(if $(GPU),$(B)/libqtool_kernels.a)
# The package of MPI. MPI= builds without: qtool is then one process.
MPI     ?= $(shell pkg-config --exists mpi-c 2>/dev/null && echo mpi-c)
CLI_OBJ := $(patsubst %.c,$(B)/%.o,$(filter-out cli/comm_$(if $(MPI),none,mpi).c,$(filter cli/%,$(ALL_SRC))))

all: $(B)/qtool

# `make deps all`: packages first.
FIRST   := $(filter deps,$(MAKECMDGOALS))

Q        = $(if $(V),,@echo "  $(1) $@"; )
COMPILE  = $(call Q,CC)$(CC) $(QFLAGS) $(CFLAGS) -c -o $@ $<
LINK     = $(call Q,LINK)$(CC) $(CFLAGS) -fopenmp -o $@ $(filter %.o %.a,$^) $$(cat $(B)/pkg.libs) -lm

$(B)/pkg.cflags $(B)/pkg.libs: | $(FIRST)
	@mkdir -p $(@D)
	@pkg-config --$(patsubst .%,%,$(suffix $@)) $(PKGS) >$@ || \
	    { rm -f $@; echo "a library is missing: run 'make deps', or see DEBS in the Makefile"; exit 1; }

$(B)/qtool: $(CLI_OBJ) $(GPU_OBJ) $(B)/libqtool.a $(B)/optional_parts | $(B)/pkg.libs
	$(if $(NVCC),,@echo "nvcc not found: building without CUDA")
	$(if $(MPI),,@echo "MPI not found: building for one process (docs/cluster.md)")
	$(LINK) $(CUDA_RT) $(if $(MPI),$$(pkg-config --libs $(MPI)))

$(B)/cli/comm_mpi.o: QFLAGS += $$(pkg-config --cflags $(MPI))

# Lists what may come or go, nvcc and MPI: qtool is then linked again.
$(B)/optional_parts: always
	@mkdir -p $(@D)
	@echo '$(GPU_OBJ) $(MPI)' | cmp -s - $@ || echo '$(GPU_OBJ) $(MPI)' >$@

# q, not r: objects of several folders have the same name.
$(B)/libqtool.a: $(LIB_OBJ)
	@rm -f $@
	$(call Q,AR)$(AR) qcs $@ $^

$(B)/%.o: %.c | $(B)/pkg.cflags
	@mkdir -p $(@D)
	$(COMPILE)

$(B)/pack/schemes/rowops.%.o: pack/schemes/rowops.c | $(B)/pkg.cflags
	@mkdir -p $(@D)
	$(COMPILE) $(ISA_$*) -DQT_ISA=$*

# Its vectors are wider than some instruction sets pass in registers, but none leaves the file.
$(B)/pack/schemes/mix24/fit.%.o: pack/schemes/mix24/fit.c | $(B)/pkg.cflags
	@mkdir -p $(@D)
	$(COMPILE) $(ISA_$*) -Wno-psabi -DQT_ISA=$*

include cuda.mk
include tests.mk

# ---- packages ----------------------------------------------------------------------------------

DEBS    := gcc libc6-dev make pkg-config libopenblas-dev liblapacke-dev zlib1g-dev libjansson-dev \
           libpcre2-dev libutf8proc-dev nettle-dev libcmocka-dev
# For fmt, tidy, builds with clang (libomp: its OpenMP), several ranks (Open MPI) and tests that skip
# themselves without them; neither the build nor the test suite needs these.
DEV_DEBS := clang libomp-dev clang-format clang-tidy valgrind python3-jsonschema zsh libopenmpi-dev openmpi-bin

deps-dev: | $(filter deps,$(MAKECMDGOALS))
deps: NEEDED = $(DEBS)
deps-dev: NEEDED = $(DEV_DEBS)
deps deps-dev:
	@command -v apt-get >/dev/null || { echo "no apt-get here: install the equivalents of: $(NEEDED)"; \
	    pkg-config --exists $(PKGS) cmocka; exit; }; \
	missing=$$(for p in $(NEEDED); do dpkg-query -Wf '$${Status}' $$p 2>/dev/null | \
	    grep -q 'ok installed' || echo $$p; done); \
	[ -n "$$missing" ] || { echo "all packages are installed"; exit 0; }; \
	sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	$$sudo apt-get update -q && $$sudo env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qy --no-install-recommends $$missing

# ---- using -------------------------------------------------------------------------------------

demo: $(B)/qtool
	examples/demo.sh $(B)/qtool $(B)/demo

# The charts and generated tables of docs/kernels_speed.md and quantize_speed.md, from docs/*.tsv.
charts:
	$(PYTHON) docs/charts.py

DOC := $(DESTDIR)$(PREFIX)/share/doc/qtool
install: all
	install -D -m 755 $(B)/qtool "$(DESTDIR)$(PREFIX)/bin/qtool"
	install -d "$(DOC)/docs"
	install -m 644 README.md CHANGELOG.md SECURITY.md LICENSE "$(DOC)"
	install -m 644 $(wildcard docs/*.md docs/*.tsv docs/*.svg docs/*.json) "$(DOC)/docs"
	install -d "$(DESTDIR)$(PREFIX)/share/man/man1" \
	    "$(DESTDIR)$(PREFIX)/share/bash-completion/completions" \
	    "$(DESTDIR)$(PREFIX)/share/zsh/site-functions" \
	    "$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d"
	$(B)/qtool manual >"$(DESTDIR)$(PREFIX)/share/man/man1/qtool.1"
	sed -i "s|/usr/local/share/doc|$(PREFIX)/share/doc|" "$(DESTDIR)$(PREFIX)/share/man/man1/qtool.1"
	$(B)/qtool completion bash >"$(DESTDIR)$(PREFIX)/share/bash-completion/completions/qtool"
	$(B)/qtool completion zsh >"$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_qtool"
	$(B)/qtool completion fish >"$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/qtool.fish"
	$(if $(NVCC),@$(MAKE) --no-print-directory install-kernels)

# ---- packages to give away ---------------------------------------------------------------------

VERSION := $(shell sed -n 's/^\#define QT_VERSION  *"\(.*\)"/\1/p' base/base.h)

# The committed source tree; the same commit gives the same bytes.
dist:
	@mkdir -p $(B)
	git archive --prefix=qtool-$(VERSION)/ HEAD -- . ':(exclude)debian' | gzip -9n \
	    >$(B)/qtool-$(VERSION).tar.gz
	@echo "$(B)/qtool-$(VERSION).tar.gz"

# Debian packages of it into $(B)/deb; with nvcc also those of the kernel library. Needs debhelper.
# If lintian is there, it must have nothing to say, except that the upload closes no Debian bug.
deb: dist
	rm -rf $(B)/deb && mkdir $(B)/deb
	cp $(B)/qtool-$(VERSION).tar.gz $(B)/deb/qtool_$(VERSION).orig.tar.gz
	tar xzf $(B)/qtool-$(VERSION).tar.gz -C $(B)/deb
	git archive HEAD debian | tar x -C $(B)/deb/qtool-$(VERSION)
	cd $(B)/deb/qtool-$(VERSION) && env -u MAKEFLAGS -u MAKELEVEL \
	    DEB_BUILD_PROFILES=$(if $(NVCC),pkg.qtool.cuda) dpkg-buildpackage -us -uc
	! command -v lintian >/dev/null || lintian --fail-on error,warning \
	    --suppress-tags initial-upload-closes-no-bugs $(B)/deb/*.changes

clean:
	rm -rf $(B)

.PHONY: all always deps deps-dev demo charts install dist deb clean
.SECONDARY:
-include $(shell find $(B) -path '$(B)/deb' -prune -o -type f -name '*.d' -print 2>/dev/null)
