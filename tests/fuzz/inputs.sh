#!/bin/sh
# Prints the directories that hold inputs of a fuzz target.
#
#   usage: tests/fuzz/inputs.sh TARGET

cd "$(dirname "$0")/../.." || exit 1
golden=
[ "$1" != torch ] || golden=tests/golden/torch
for dir in "tests/fuzz/corpus/$1" "tests/bad/$1" $golden; do
    [ ! -d "$dir" ] || echo "$dir"
done
