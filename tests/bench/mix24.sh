#!/usr/bin/env bash
# The tables of docs/accuracy.md about mix24: each part of the method on top of those before it, and
# perplexity against true bits per weight.
#   mix24.sh CKPT IDS TEXT
# Output as of accuracy.sh.
set -eu
here=$(dirname "$0")
ladder=(
    mix24:paper=1,outliers=0
    mix24:sens=paper,order=natural,outliers=0,polish=0
    mix24:sens=paper,outliers=0,polish=0
    mix24:outliers=0,polish=0
    mix24:outliers=0
    mix24
)
curve=(mix24:four=0 mix24:four=0.1 mix24:outliers=0.005 mix24:four=0.5 mix24:four=1 nf3)
exec "$here/accuracy.sh" "$1" "$2" --data "$3" "${ladder[@]}" "${curve[@]}"
