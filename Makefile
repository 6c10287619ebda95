# qtool. Targets: all (default), deps, demo, test, check, bench, fmt, tidy, install, clean.
# Everything built goes to $(B). CUDA parts are built when nvcc is found (NVCC= to leave them out).

MAKEFLAGS += --no-builtin-rules
B       ?= build
PREFIX  ?= /usr/local
CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
CFLAGS  ?= -O3 -g
NVCC    ?= $(shell command -v nvcc 2>/dev/null)

PKGS    := openblas lapacke jansson libpcre2-8 libutf8proc zlib
WARN    := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
# No contraction: a * b + c must round the same on every instruction set.
QFLAGS  := -std=c11 -D_GNU_SOURCE -I. -fopenmp -ffp-contract=off $(WARN) -MMD -MP \
           $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
LIBS     = $(shell pkg-config --libs $(PKGS)) -lm

# pack/rowops.c is built once per instruction set and chosen at run time.
ISA_generic :=
ISA_avx2    := -mavx2
ISA_avx512  := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
ISAS    := generic $(if $(filter x86_64,$(shell uname -m)),avx2 avx512)

FOLDERS := base formats calib hessian pack kernels verify
LIB_SRC := $(filter-out pack/rowops.c,$(wildcard $(FOLDERS:%=%/*.c)))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o) $(ISAS:%=$(B)/pack/rowops.%.o)
CLI_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard cli/*.c))
UNIT    := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))
BENCH   := $(patsubst tests/bench/%.c,$(B)/tests/%,$(wildcard tests/bench/bench_*.c))
SOURCES := $(wildcard $(FOLDERS:%=%/*.[ch]) cli/*.[ch] tests/unit/*.[ch] tests/bench/*.[ch] \
           tests/oracle/*.c)

all: $(B)/qtool

$(B)/qtool: $(CLI_OBJ) $(B)/libqtool.a
	$(CC) $(CFLAGS) -fopenmp -o $@ $^ $(LIBS)

$(B)/libqtool.a: $(LIB_OBJ)
	@rm -f $@
	$(AR) rcs $@ $^

$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(QFLAGS) $(CFLAGS) -c -o $@ $<

$(B)/pack/rowops.%.o: pack/rowops.c
	@mkdir -p $(@D)
	$(CC) $(QFLAGS) $(CFLAGS) $(ISA_$*) -DQT_ISA=$* -c -o $@ $<

$(B)/tests/%: $(B)/tests/unit/%.o $(B)/libqtool.a
	$(CC) $(CFLAGS) -fopenmp -o $@ $^ $(LIBS) -lcmocka

$(B)/tests/%: $(B)/tests/bench/%.o $(B)/libqtool.a
	$(CC) $(CFLAGS) -fopenmp -o $@ $^ $(LIBS)

$(B)/tests/%: $(B)/tests/oracle/%.o $(B)/libqtool.a
	$(CC) $(CFLAGS) -fopenmp -o $@ $^ $(LIBS)

clean:
	rm -rf $(B)

.PHONY: all clean
.SECONDARY:
-include $(shell find $(B) -name '*.d' 2>/dev/null)
