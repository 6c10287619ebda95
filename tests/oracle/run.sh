#!/bin/sh
# Checks against other people's implementations, in Python.
#
#   usage: tests/oracle/run.sh BUILD NAME...      PYTHON: the interpreter, default python3
#
#   tokenizer   ids of many kinds of tokenizers, by `tokenizers`, `sentencepiece` and `tiktoken`
#   families    the model types of transformers, and which of them qtool runs
#   chat        what Jinja2 makes of chat templates, made again; needs jinja2
#   pack        the golden bytes of packed matrices, made again; needs numpy
#   kv          the golden numbers of 4-bit KV caches, made again; needs numpy
#   qcal        the golden calibration file, made again; needs numpy
#   sources     quantized checkpoints, dequantized by the packages that write them (3 GB)
#   model       logits and gradients of random models of every family, by transformers and torch (2 GB)
#   exports     exports of the example checkpoint, loaded by the packages of runtimes (3 GB)
#   gptqmodel   gptq and awq exports in GPTQModel, on the CPU (4 GB)
#   mlx         mlx exports in mlx_lm, on the CPU: experts, modules with options of their own (3 GB)
#   python      kernels/python: containers in PyTorch and transformers, on the CPU (3 GB)
#   gguf        GGUF exports, decoded by gguf, and read back by qtool, models of every architecture
#   vllm        exports in the config parsers and weight loaders of vLLM 0.33, on the CPU (1 GB)
#   llama.cpp   GGUF exports, run by llama.cpp, which is compiled (takes long), against transformers
#   registers   machine code of BUILD/libqtool_kernels.a, by wgmma_registers.py and NVIDIA's cuobjdump
#
# Packages that PYTHON lacks are installed into BUILD/venv; what cannot be had is skipped, loudly.
# Exit status 1 if anything differed.

cd "$(dirname "$0")/../.." || exit 1
build=${1:?usage: tests/oracle/run.sh BUILD NAME...}
shift
system=${PYTHON:-python3}
passed=0 failed=0 skipped=0

# into_venv PACKAGE...: sets $python to the interpreter that has them.
into_venv() {
    python=$build/venv/bin/python
    [ -x "$python" ] || "$system" -m venv "$build/venv" || return
    echo "installing $* into $build/venv"
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

# provide MODULE...: the same for what is imported by its package's name, where it is not there yet.
provide() {
    for python in "$system" "$build/venv/bin/python"; do
        "$python" -c "import $(echo "$*" | tr ' ' ,)" 2>/dev/null && return
    done
    into_venv "$@"
}

# Puts cuobjdump, and nvdisasm, which it runs, on the path: many installations of nvcc are without.
provide_cuobjdump() {
    command -v "${CUOBJDUMP:-cuobjdump}" >/dev/null && command -v nvdisasm >/dev/null && return
    into_venv nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm || return
    for bin in "$build"/venv/lib/python3*/site-packages/nvidia/cu*/bin; do
        PATH=$PATH:$bin
    done
    unset CUOBJDUMP
    command -v cuobjdump >/dev/null && command -v nvdisasm >/dev/null
}

check() {
    case $1 in
    tokenizer)
        provide tokenizers sentencepiece tiktoken || return 77
        "$python" tests/oracle/tokenizer.py "$build/tests/tokenize"
        ;;
    pack)
        provide numpy || return 77
        rm -rf "$build/golden" && "$python" tests/oracle/make_pack_golden.py "$build/golden" &&
            diff -r "$build/golden" tests/golden/pack
        ;;
    kv)
        provide numpy || return 77
        "$python" tests/oracle/make_kv_golden.py "$build/golden_kv" &&
            diff -r "$build/golden_kv" tests/golden/kv
        ;;
    qcal)
        provide numpy || return 77
        "$python" tests/oracle/make_qcal_golden.py "$build/experts.qcal" &&
            cmp "$build/experts.qcal" tests/golden/qcal/experts.qcal
        ;;
    sources)
        into_venv "torch==2.*" "transformers==5.*" compressed-tensors==0.20.1 \
            bitsandbytes==0.50.2 gguf==0.19.0 numpy safetensors || return 77
        rm -rf "$build/sources" &&
            "$python" tests/oracle/make_source_golden.py "$build/sources" &&
            diff -r "$build/sources" tests/golden/sources
        ;;
    chat)
        provide jinja2 || return 77
        "$python" tests/oracle/make_chat_golden.py "$build/chat.json" &&
            diff "$build/chat.json" tests/golden/chat.json
        ;;
    families)
        provide transformers || return 77
        "$python" tests/oracle/families.py "$build/qtool"
        ;;
    model)
        provide numpy tokenizers safetensors transformers torch || return 77
        "$python" tests/oracle/make_model_golden.py --check "$build/tests/test_model" \
            "$build/tests/test_backward"
        ;;
    exports)
        into_venv "torch==2.*" "transformers==5.*" compressed-tensors==0.20.1 \
            bitsandbytes==0.50.2 accelerate safetensors "mlx[cpu]" || return 77
        rm -rf "$build/exports" && mkdir -p "$build/exports" &&
            "$python" tests/oracle/exports.py "$build/qtool" examples/nano-llama "$build/exports" \
                "$build/exports/golden.txt" &&
            diff "$build/exports/golden.txt" tests/golden/exports.txt
        ;;
    gptqmodel)
        into_venv "torch==2.*" "transformers==5.*" "setuptools==84.*" wheel &&
            into_venv --no-build-isolation gptqmodel==7.7.0 || return 77
        rm -rf "$build/gptqmodel" && mkdir -p "$build/gptqmodel" &&
            "$python" tests/oracle/exports_gptqmodel.py "$build/qtool" "$build/gptqmodel" \
                examples/nano-llama:examples/nano-llama/eval.txt
        ;;
    mlx)
        into_venv "torch==2.*" "transformers==5.*" "mlx[cpu]==0.32.*" "mlx-lm==0.32.*" || return 77
        rm -rf "$build/mlx" && mkdir -p "$build/mlx" &&
            "$python" tests/oracle/exports_mlx.py "$build/qtool" "$build/mlx"
        ;;
    vllm)
        into_venv "torch==2.*" "transformers==5.*" safetensors numpy aiohttp blake3 cachetools cbor2 \
            cloudpickle diskcache einops fastapi gguf msgspec openai openai-harmony \
            opentelemetry-sdk partial-json-parser pillow prometheus-client protobuf psutil \
            py-cpuinfo pybase64 pydantic pydantic-settings pyzmq regex requests sentencepiece \
            setproctitle tiktoken uvloop || return 77
        [ -d "$build/vllm" ] ||
            { "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
                --target "$build/vllm.partial" vllm==0.33.0 compressed-tensors==0.17.0 \
                humming-kernels==0.1.19 && mv "$build/vllm.partial" "$build/vllm"; } || return 77
        rm -rf "$build/vllm-exports" && mkdir -p "$build/vllm-exports" &&
            PYTHONPATH=$(realpath "$build/vllm") "$python" tests/oracle/exports_vllm_loaders.py \
                "$build/qtool" examples/nano-llama "$build/vllm-exports"
        ;;
    python)
        into_venv "torch==2.*" "transformers==5.*" safetensors numpy pytest || return 77
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps ./kernels/python &&
            QTOOL=$(realpath "$build/qtool") "$python" -m pytest -q kernels/python/tests
        ;;
    gguf)
        into_venv gguf==0.19.0 numpy safetensors "torch==2.*" "transformers==5.*" || return 77
        rm -rf "$build/gguf" && mkdir -p "$build/gguf" &&
            "$python" tests/oracle/gguf_decode.py "$build/qtool" "$build/gguf" examples/nano-llama &&
            "$python" tests/oracle/gguf_families.py "$build/qtool" "$build/gguf"
        ;;
    llama.cpp)
        CMAKE_ARGS="-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF -DLLAMA_OPENSSL=OFF" \
            CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) into_venv llama-cpp-python==0.3.36 numpy \
            safetensors "torch==2.*" "transformers==5.*" || return 77
        rm -rf "$build/llama" && mkdir -p "$build/llama" &&
            "$python" tests/oracle/gguf_llama.py "$build/qtool" "$build/llama" \
                examples/nano-llama:examples/nano-llama/eval.txt
        ;;
    registers)
        provide_cuobjdump || return 77
        "$system" tests/gpu/wgmma_registers.py "$build/libqtool_kernels.a"
        ;;
    *)
        echo "unknown check '$1'" >&2
        return 1
        ;;
    esac
}

for name; do
    echo "== $name"
    check "$name"
    case $? in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) && echo "SKIP $name: Python or its packages cannot be had here" ;;
    *) failed=$((failed + 1)) && echo "FAIL $name" ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
