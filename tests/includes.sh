#!/bin/sh
# Checks that folders include each other only in their order, and only by the public header.
#
#   usage: tests/includes.sh [DIR]      DIR: the tree to check, default this one
#          tests/includes.sh --test     this tree, and that the check finds what it is to find
#
# Prints one line per violation and a summary line; exits 1 if there are any.

# FOLDER: what it may include besides its own files. The public header of a folder is
# FOLDER/FOLDER.h; kernels/include has the public headers of libqtool_kernels, which stand alone.
# The order of the folders is the order of this table: none includes a folder below its own line.
rules='
base:
formats: base/base.h
model:   base/base.h formats/formats.h
calib:   base/base.h formats/formats.h model/model.h
hessian: base/base.h
pack:    base/base.h formats/formats.h formats/layouts/layout_*.h model/model.h calib/calib.h
         hessian/hessian.h
kernels: base/base.h formats/layouts/layout_*.h
verify:  base/base.h formats/formats.h model/model.h calib/calib.h pack/pack.h
         kernels/kernels.h kernels/include/*.h
cli:     base/base.h formats/formats.h model/model.h calib/calib.h hessian/hessian.h pack/pack.h
         verify/verify.h kernels/kernels.h kernels/include/*.h
'

# Violations in the tree DIR, one a line; fails if there are any or no line was looked at.
violations() {
    (cd "$1" && grep -rHn --include='*.c' --include='*.h' --include='*.cc' --include='*.cu' --include='*.cuh' \
        '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' base formats model calib hessian \
        pack kernels verify cli 2>/dev/null) | RULES=$rules awk '
        BEGIN {
            n = split(ENVIRON["RULES"], words)
            for (i = 1; i <= n; i++)
                if (words[i] ~ /:$/)
                    from = substr(words[i], 1, length(words[i]) - 1)
                else
                    may[from] = may[from] " " words[i]
        }
        {
            split($0, quoted, "\"")
            split($0, place, ":")
            target = quoted[2]
            folder = place[1]
            sub("/.*", "", folder)
            good = index(target, folder "/") == 1 && index(target, "..") == 0
            # Installed as they are, so they find each other beside themselves.
            if (place[1] ~ "^kernels/include/")
                good = target ~ "^qtool_[a-z0-9]*[.]h$"
            n = split(may[folder], words)
            for (i = 1; i <= n; i++) {
                pattern = "^" words[i] "$"
                gsub("[.]", "[.]", pattern)
                gsub("[*]", "[a-z0-9_]*", pattern)
                good = good || target ~ pattern
            }
            if (!good)
                print place[1] ":" place[2] ": " folder " must not include \"" target "\""
            bad += !good
        }
        END { exit bad || !NR }'
}

# find_fault FILE LINE EXPECTED: the check of a tree with just this line gives this status.
find_fault() {
    rm -rf "$tmp"/* && mkdir -p "$tmp/$(dirname "$1")" && printf '%s\n' "$2" >"$tmp/$1"
    violations "$tmp" >/dev/null
    [ $? -eq "$3" ] && passed=$((passed + 1)) && return
    failed=$((failed + 1))
    echo "FAIL: in $1, $2: expected status $3"
}

self_test() {
    tmp=$(mktemp -d) || exit 1
    trap 'rm -rf "$tmp"' EXIT
    find_fault base/a.c '#include "formats/formats.h"' 1
    find_fault calib/a.c '#include "pack/pack.h"' 1
    find_fault hessian/a.h '#include "calib/calib.h"' 1
    find_fault pack/a.c '#include "kernels/kernels.h"' 1
    find_fault pack/a.c '#include "formats/formats_internal.h"' 1
    find_fault pack/a.c '  #  include  "verify/verify.h"' 1
    find_fault kernels/cuda/a.cuh '#include "pack/layouts/frag.h"' 1
    find_fault kernels/include/qtool_a.h '#include "kernels/include/qtool_b.h"' 1
    find_fault model/a.c '#include "calib/calib.h"' 1
    find_fault kernels/cuda/a.cu '#include "pack/pack.h"' 1
    find_fault verify/a.c '#include "cli/cli.h"' 1
    find_fault cli/a.c '#include "base/io.h"' 1
    find_fault cli/a.c '#include "neighbour.h"' 1
    find_fault cli/a.c '#include "cli/../base/io.h"' 1
    find_fault base/a.c '/* nothing */' 1
    find_fault base/a.c '#include "base/io.h"' 0
    find_fault kernels/cuda/a.cu '#include "formats/layouts/layout_frag.h"' 0
    find_fault cli/a.c '#include "verify/verify.h"' 0
    find_fault kernels/include/qtool_a.h '#include "qtool_b.h"' 0
    find_fault verify/a.c '#include "kernels/include/qtool_kernels.h"' 0
    find_fault pack/a.c '#include "hessian/hessian.h"' 0
}

cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0
tree=.
case $1 in
--test) self_test ;;
?*) tree=$1 ;;
esac
if violations "$tree"; then
    passed=$((passed + 1))
else
    failed=$((failed + 1))
fi
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
