# libqtool_kernels (kernels/include, kernels/cuda): machine code for Ampere (8.0, which 8.6 and 8.9
# run too) and Hopper, and PTX for later devices. Independent of libqtool. Included by Makefile.

ifneq ($(NVCC),)
CUDA_HOME ?= $(abspath $(dir $(shell command -v $(NVCC)))..)
CUDA_ARCH ?= -gencode arch=compute_80,code=[sm_80,compute_80] \
             -gencode arch=compute_90a,code=sm_90a
# Five sets of .cu files, by the devices that they are compiled for:
#   HOPPER  9.0a alone; one compilation each, the longest first, so that no core idles at the end
#   older   8.0 alone: Hopper has other kernels for the same products; CUDA_OLD: the same, each a
#           compilation of its own
#   seldom  8.0 and 9.0: kernels that Hopper seldom runs
#   rare    8.0 and 9.0a, compressed: kernels of models that few use
#   either  8.0 and 9.0a; CUDA_LONG: the same, each a compilation of its own
# The other four are one compilation each, as nvcc needs two seconds per file before the first
# kernel.
CUDA_HOPPER := matmul/tile_group moe/wide matmul/tile_fpx w4ax/hopper mix24/hopper matmul/skinny \
               matmul/gated moe/few moe/w4ax_wide moe/mix24_wide matmul/many
CUDA_older  := matmul/stream matmul/mma_tile w4ax/stream_sm80
CUDA_seldom := matmul/int4_zero matmul/dequantize mix24/dequantize
CUDA_rare   := decoder/rare
CUDA_LONG   := moe/w4ax_few moe/w4ax_quantize
CUDA_OLD    := moe/product moe/many moe/w4ax_many
CUDA_either := $(filter-out $(CUDA_HOPPER) $(CUDA_older) $(CUDA_seldom) $(CUDA_rare) $(CUDA_LONG) \
                 $(CUDA_OLD),$(sort $(patsubst kernels/cuda/%.cu,%,$(wildcard kernels/cuda/*/*.cu))))
CUDA_FIRST  := $(firstword $(CUDA_HOPPER))
CUDA_OBJ    := $(patsubst %,$(B)/kernels/cuda/%.o,$(CUDA_FIRST) $(CUDA_LONG) either older \
                 $(CUDA_OLD) $(filter-out $(CUDA_FIRST),$(CUDA_HOPPER)) seldom rare) \
               $(patsubst %.cc,$(B)/%.o,$(sort $(wildcard kernels/cuda/*/*.cc)))
CUDA_GROUPS := older seldom rare either
CUDA_LIBS := $(B)/libqtool_kernels.a $(B)/libqtool_kernels.so
CUDA_LINK := -L$(CUDA_HOME)/lib64 -lcudart_static -lm -ldl -lrt -lpthread
CUDA_RT   := $(if $(GPU),$(CUDA_LINK))
SONAME    := libqtool_kernels.so.1

all: kernels
kernels: $(CUDA_LIBS)

$(B)/libqtool_kernels.a: $(CUDA_OBJ)
	@rm -f $@
	$(call Q,AR)$(AR) qcs $@ $^

# Only the declarations of the public headers are visible; -x: without names of local functions.
$(B)/libqtool_kernels.so: $(CUDA_OBJ) kernels/cuda/exports.map
	$(call Q,LINK)$(CC) -shared -o $@ $(CUDA_OBJ) -Wl,-soname,$(SONAME) \
	    -Wl,--version-script=kernels/cuda/exports.map -Wl,-x $(CUDA_LINK)

$(CUDA_HOPPER:%=$(B)/kernels/cuda/%.o) $(B)/tests/gpu/bench_tensor.o: CUDA_ARCH := \
    -gencode arch=compute_90a,code=sm_90a
# Where Hopper is to run kernels of older devices (`--compute 8.0`), the driver compiles their PTX.
CUDA_80 := $(patsubst %,$(B)/kernels/cuda/%.o,older $(CUDA_OLD))
$(CUDA_80): CUDA_ARCH := -gencode arch=compute_80,code=[sm_80,compute_80]
# Compressed for size (nvcc 12.8 and later), machine code is a fifth as large, but takes longer to
# compile and to load: only what Hopper does not run, or few models need.
$(CUDA_80) $(B)/kernels/cuda/rare.o: CUDA_SIZE = $(shell $(NVCC) --help | \
    grep -q compress-mode && echo --compress-mode=size)
$(B)/kernels/cuda/seldom.o: CUDA_ARCH := -gencode arch=compute_80,code=[sm_80,sm_90,compute_80]

# C++ serves for templates only: programs that link the library need no C++ run time. (The only
# statics are the constant ones of nvcc's launch stubs.)
CUDA_HOST := -fPIC -fno-exceptions -fno-rtti -fno-threadsafe-statics
# (nvcc always includes <cmath>; that of C++17 takes 0.4 s longer per file. The code uses
# `if constexpr` of C++17, which both compilers take as an extension of C++14.)
CUDA_STD  := -std=c++14 -diag-suppress 2912 -Xcompiler -Wno-c++17-extensions
CUDA_CXX = $(NVCC) -O3 $(CUDA_STD) -I. $(CUDA_HOST:%=-Xcompiler %) $(LINEINFO) -MMD -MP \
    $(CUDA_SIZE) -c -o $@ $<
$(B)/%.o: %.cu
	@mkdir -p $(@D)
	$(call Q,NVCC)$(CUDA_CXX) $(CUDA_ARCH)
$(B)/kernels/cuda/%.o: $(B)/kernels/cuda/%.cu
	$(call Q,NVCC)$(CUDA_CXX) $(CUDA_ARCH)
$(CUDA_GROUPS:%=$(B)/kernels/cuda/%.cu): always
	@mkdir -p $(@D)
	@printf '#include "kernels/cuda/%s.cu"\n' $(CUDA_$(basename $(@F))) >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Host code of the library.
$(B)/%.o: %.cc
	@mkdir -p $(@D)
	$(call Q,CXX)$(CXX) -O2 -std=c++14 -Wall -I. -isystem $(CUDA_HOME)/include $(CUDA_HOST) -MMD -MP -c -o $@ $<

$(B)/kernels/gpu/copy.o $(B)/kernels/gpu/cuda.o $(B)/tests/gpu/%.o: QFLAGS += -isystem $(CUDA_HOME)/include
$(B)/tests/gpu/%: $(B)/tests/gpu/%.o $(GPU_OBJ) $(B)/libqtool.a | $(B)/pkg.libs
	$(LINK) $(CUDA_LINK)
$(B)/tests/gpu/test_mix24: $(B)/tests/gpu/mix24_matrix.o
$(B)/tests/gpu/test_kernels $(B)/tests/gpu/test_gated $(B)/tests/gpu/test_many $(B)/tests/gpu/test_mix24 \
    $(B)/tests/gpu/test_moe $(B)/tests/gpu/test_kv4 $(B)/tests/gpu/test_w4ax $(B)/tests/gpu/test_backend $(B)/tests/gpu/test_round $(B)/tests/gpu/test_decoder $(B)/tests/gpu/test_fused \
    $(B)/tests/gpu/bench_w4ax: $(B)/tests/gpu/reference.o
# These link a simulated device instead of the CUDA runtime.
$(B)/tests/gpu/test_launch $(B)/tests/gpu/test_refuse: %: %.o $(B)/tests/gpu/simulated.o $(B)/libqtool_kernels.a \
    | $(B)/pkg.libs
	$(LINK)
$(B)/tests/gpu/bench_w4ax: CUDA_LINK += -lcublas -lstdc++
$(B)/tests/gpu/bench_tensor: CUDA_LINK += -lstdc++

# The library, its headers and its pkg-config file: `pkg-config [--static] qtool-kernels`.
install-kernels: kernels
	install -d "$(DESTDIR)$(PREFIX)/include"
	install -m 644 kernels/include/*.h "$(DESTDIR)$(PREFIX)/include"
	install -D -m 644 $(B)/libqtool_kernels.a "$(DESTDIR)$(LIBDIR)/libqtool_kernels.a"
	install -D -m 755 $(B)/libqtool_kernels.so "$(DESTDIR)$(LIBDIR)/$(SONAME)"
	ln -sf $(SONAME) "$(DESTDIR)$(LIBDIR)/libqtool_kernels.so"
	install -d "$(DESTDIR)$(LIBDIR)/pkgconfig"
	sed -e "s|@prefix@|$(PREFIX)|" -e "s|@libdir@|$(LIBDIR)|" -e "s|@cuda@|$(CUDA_HOME)|" \
	    kernels/cuda/qtool-kernels.pc.in >"$(DESTDIR)$(LIBDIR)/pkgconfig/qtool-kernels.pc"

# test_plan, test_launch and test_refuse need no GPU, and wgmma_registers reads machine code; the
# others say SKIP where there is no GPU. CUDA_FORCE_PTX_JIT: the kernels for devices of 8.x and 12.x.
test-gpu: $(addprefix $(B)/tests/gpu/,test_plan test_launch test_refuse test_backend test_round test_kernels test_gated test_many test_mix24 test_moe test_kv4 test_fused test_w4ax test_decoder sweep) \
          $(B)/libqtool_kernels.a $(B)/qtool
	$(B)/tests/gpu/test_plan
	$(B)/tests/gpu/test_launch
	$(B)/tests/gpu/test_refuse
	$(B)/tests/gpu/test_backend
	$(B)/tests/gpu/test_round
	$(PYTHON) tests/gpu/wgmma_registers.py $(B)/libqtool_kernels.a
	$(B)/tests/gpu/test_kernels
	$(B)/tests/gpu/test_mix24
	$(B)/tests/gpu/test_moe
	$(B)/tests/gpu/test_kv4
	$(B)/tests/gpu/test_fused
	$(B)/tests/gpu/test_w4ax
	$(B)/tests/gpu/test_decoder
	for t in kernels mix24 moe kv4 fused w4ax decoder; do \
	    CUDA_FORCE_PTX_JIT=1 $(B)/tests/gpu/test_$$t 7 quick || exit 1; done
	tests/gpu/commands.sh $(B)/qtool
	tests/gpu/families.sh $(B)/qtool

# The machine code, by NVIDIA's cuobjdump, which goes to $(B)/venv if it is not installed.
oracle-registers: $(B)/libqtool_kernels.a
	@PYTHON=$(PYTHON) tests/oracle/run.sh $(B) registers

# Needs a GPU, and some minutes.
sanitize-gpu: $(addprefix $(B)/tests/gpu/,test_backend test_round test_kernels test_gated test_many test_mix24 test_moe test_kv4 test_fused test_w4ax test_decoder)
	for tool in memcheck synccheck initcheck racecheck; do for t in $^; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $$t 7 quick || exit 1; done; done
else
kernels test-gpu sanitize-gpu oracle-registers install-kernels:
	@echo "SKIP: nvcc not found, no CUDA code is built"
endif

.PHONY: kernels install-kernels test-gpu sanitize-gpu oracle-registers
