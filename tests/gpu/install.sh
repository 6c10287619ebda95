#!/bin/sh
# Tests `make install`: the program, also with a DESTDIR that needs quoting; and the kernel library: a
# C and a C++ program are built with pkg-config, with the shared and the static library, and run.
# They ask for a plan that is refused, so no GPU is needed.
#
#   usage: tests/gpu/install.sh BUILD     prints "N passed, M failed, K skipped"

cd "$(dirname "$0")/../.." || exit 1
build=${1:?usage: tests/gpu/install.sh BUILD}
case $build in /*) ;; *) build=$PWD/$build ;; esac
passed=0 failed=0
root="$build/packager's (own) root"
rm -rf "$root"
if make -s B="$build" DESTDIR="$root" PREFIX=/usr install && "$root/usr/bin/qtool" version &&
    grep -q '^[^/]*/usr/share/doc/qtool/docs' "$root/usr/share/man/man1/qtool.1"; then
    passed=$((passed + 1))
else
    failed=$((failed + 1))
    echo "FAILED DESTDIR"
fi
if ! command -v "${NVCC-nvcc}" >/dev/null; then
    echo "SKIP: nvcc not found, there is no library to install"
    echo "$passed passed, $failed failed, 1 skipped"
    exit $failed
fi
dir=$build/installed
rm -rf "$dir"
make -s B="$build" PREFIX="$dir" install || exit 1
PKG_CONFIG_PATH=$dir/lib/pkgconfig
LD_LIBRARY_PATH=$dir/lib
export PKG_CONFIG_PATH LD_LIBRARY_PATH

cat >"$dir/use.c" <<'EOF'
#include <qtool_kernels.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    struct qtool_matmul_weight w, slice;
    struct qtool_matmul_options opt;
    struct qtool_matmul_plan plan;
    memset(&w, 0, sizeof w);
    memset(&opt, 0, sizeof opt);
    w.kind = QTOOL_MATMUL_LUT;
    w.bits = 7;
    int rc = qtool_matmul_plan(&plan, &w, 1, &opt);
    printf("%d %s\n", rc, plan.reason);
    return qtool_kernels_version() != QTOOL_KERNELS_VERSION || rc != QTOOL_UNSUPPORTED ||
           !strstr(plan.reason, "bits out of range") ||
           qtool_matmul_slice(&slice, &w, 0, 16, 0, 64) != QTOOL_UNSUPPORTED;
}
EOF
cp "$dir/use.c" "$dir/use.cc"

# try NAME COMMAND...
try() {
    name=$1
    shift
    if "$@" && "$dir/use" version; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $name"
    fi
    rm -f "$dir/use"
}
strict="-Wall -Wextra -Werror -pedantic"
flags=$(pkg-config --cflags qtool-kernels) && shared=$(pkg-config --libs qtool-kernels) &&
    static=$(pkg-config --static --libs qtool-kernels) || exit 1
try "C, shared" ${CC:-cc} -std=c11 $strict $flags -o "$dir/use" "$dir/use.c" $shared
try "C++, shared" ${CXX:-c++} -std=c++17 $strict $flags -o "$dir/use" "$dir/use.cc" $shared
# The archive by its file name: -lqtool_kernels would find the shared library first.
try "C, static" ${CC:-cc} -std=c11 $strict $flags -o "$dir/use" "$dir/use.c" \
    $(echo "$static" | sed "s|-lqtool_kernels|$dir/lib/libqtool_kernels.a|")
try "qtool" cp "$dir/bin/qtool" "$dir/use"
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
