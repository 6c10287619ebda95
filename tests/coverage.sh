#!/bin/sh
# Sums up a build with --coverage whose tests have run.
#
#   usage: tests/coverage.sh BUILD
#
# Prints the share of lines run per folder; BUILD/report has it per file, with the numbers of the lines
# that no test runs. Exits 1 when a folder below is under its limit.

cd "$(dirname "$0")/.." || exit 1
build=${1:?usage: tests/coverage.sh BUILD}
limits='formats 90 pack 90 hessian 90'

# "FILE RUN TOTAL LINE..." per source file. A file that is built more than once (rowops.c) counts what
# any build of it ran.
for folder in base formats calib hessian pack kernels verify cli; do
    for notes in "$build/$folder"/*.gcno; do
        [ -e "$notes" ] || continue
        gcov --stdout "$notes" 2>/dev/null
    done
done | awk '
    $0 ~ /^ *-: *0:Source:/ { file = $0; sub(/.*Source:/, "", file); next }
    file !~ /^(base|formats|calib|hessian|pack|kernels|verify|cli)\/[a-z0-9_]*\.[ch]$/ { next }
    {
        split($0, part, ":")
        count = part[1]; line = part[2] + 0
        gsub(/[ *]/, "", count)
        if (line == 0 || count == "-")
            next
        if (!((file, line) in seen)) { seen[file, line] = 1; lines[file] = lines[file] " " line; total[file]++ }
        if (count !~ /^[#=]+$/ && !((file, line) in hit)) { hit[file, line] = 1; run[file]++ }
    }
    END {
        for (file in total) {
            printf "%s %d %d", file, run[file], total[file]
            n = split(lines[file], list, " ")
            for (i = 1; i <= n; i++)
                if (!((file, list[i]) in hit))
                    printf " %s", list[i]
            printf "\n"
        }
    }' | sort >"$build/report"

[ -s "$build/report" ] || { echo "no coverage data in $build" >&2; exit 1; }
awk -v limits="$limits" '
    { split($1, path, "/"); run[path[1]] += $2; total[path[1]] += $3 }
    END {
        n = split(limits, limit, " ")
        for (i = 1; i < n; i += 2)
            least[limit[i]] = limit[i + 1]
        for (folder in total) {
            share = 100 * run[folder] / total[folder]
            low = folder in least && share < least[folder]
            printf "%-8s %5.1f %% of %5d lines%s\n", folder, share, total[folder],
                low ? "  BELOW " least[folder] " %" : ""
            failed += low
        }
        exit failed != 0
    }' "$build/report"
