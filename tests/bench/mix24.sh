#!/usr/bin/env bash
# The tables of docs/accuracy.md about mix24.
#   mix24.sh ladder|curve|layers|parts CKPT IDS [TEXT]
# ladder: each part of the method on top of those before it; curve: divergence against true bits per
# weight; layers: where the 4-bit groups are, every matrix or whole decoder layers; parts: one thing
# otherwise. Output and WINDOWS as of accuracy.sh; without TEXT nothing is calibrated.
#
# The rule on gate_proj is for models of 384 channels, where units of 128 would otherwise make every
# share a third: RULE= to leave it out.
set -eu
here=$(dirname "$0")
table=$1 ckpt=$2 ids=$3
rule=${RULE-gate_proj=mix24:four=0}

with_rule() { # PARAMETERS: mix24 with them, and the rule with them
    echo "mix24${1:+:$1}${rule:+ $rule${1:+,$1}}"
}

case $table in
ladder)
    specs=(
        "$(with_rule sens=paper,order=none,fit=minmax,outliers=0)"
        "$(with_rule sens=paper,order=none,outliers=0)"
        "$(with_rule sens=paper,order=natural,outliers=0,polish=0)"
        "$(with_rule sens=paper,outliers=0,polish=0)"
        "$(with_rule outliers=0,polish=0)"
        "$(with_rule outliers=0)"
        "$(with_rule '')"
        "$(with_rule outliers=0.005)"
        "$(with_rule paper=1)"
    ) ;;
curve)
    specs=(mix24:four=0 mix24:four=0.1 "$(with_rule '')" mix24 mix24:four=0.5 mix24:four=1 nf3) ;;
layers)
    specs=(
        'mix24:four=0 up_proj=mix24:four=0.34 down_proj=mix24:four=0.125'
        'mix24:four=0 layers\.0\..*proj=mix24:four=1'
        'mix24:four=0 layers\.7\..*proj=mix24:four=1'
        'mix24 gate_proj=mix24:four=0 down_proj=mix24:four=0.375'
        'mix24:four=0 layers\.[01]\..*proj=mix24:four=1'
        'mix24:four=0 layers\.[67]\..*proj=mix24:four=1'
    ) ;;
parts)
    specs=(
        "$(with_rule '')"
        "$(with_rule sens=obs)"
        "$(with_rule order=activity)"
        "$(with_rule ocrit=abs)"
        "$(with_rule g=8)"
        "$(with_rule g2=8)"
    ) ;;
*)
    echo "$0: no table $table" >&2
    exit 2 ;;
esac
exec "$here/accuracy.sh" "$ckpt" "$ids" ${4:+--data "$4"} "${specs[@]}"
