# qtool. Targets: all (default), deps, demo, test, check, bench, fmt, tidy, install, clean.
# Everything built goes to $(B). CUDA parts are built when nvcc is found (NVCC= to leave them out).

B       ?= build
PREFIX  ?= /usr/local
CC      ?= gcc
CFLAGS  ?= -O3 -g
NVCC    ?= $(shell command -v nvcc 2>/dev/null)

PKGS    := openblas lapacke jansson libpcre2-8 libutf8proc zlib
WARN    := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla
# No contraction: a*b+c must round the same on every instruction set (DETERMINISM in docs).
QFLAGS  := -std=c11 -D_GNU_SOURCE -I. -fopenmp -ffp-contract=off $(WARN) \
           $(shell pkg-config --cflags $(PKGS)) -MMD -MP
LIBS    := $(shell pkg-config --libs $(PKGS)) -lm

FOLDERS := base formats calib hessian pack kernels verify
LIB_SRC := $(wildcard $(FOLDERS:%=%/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/%.o)
CLI_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard cli/*.c))
UNIT    := $(patsubst tests/unit/%.c,$(B)/tests/%,$(wildcard tests/unit/test_*.c))

all: $(B)/qtool

$(B)/qtool: $(CLI_OBJ) $(B)/libqtool.a
	$(CC) $(CFLAGS) -fopenmp -o $@ $^ $(LIBS)

$(B)/libqtool.a: $(LIB_OBJ)
	$(AR) rcs $@ $^

$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(QFLAGS) $(CFLAGS) -c -o $@ $<

$(B)/tests/%: $(B)/tests/unit/%.o $(B)/libqtool.a
	$(CC) $(CFLAGS) -fopenmp -o $@ $^ $(LIBS) -lcmocka

clean:
	rm -rf $(B)

.PHONY: all clean
.SECONDARY:
-include $(shell find $(B) -name '*.d' 2>/dev/null)
