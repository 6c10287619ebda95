#!/bin/sh
# Quantizes a checkpoint.    usage: quantize.sh CHECKPOINT CONTAINER [SCHEME [DATA]]
# With DATA (text, or JSON Lines) calibrated: slower and more accurate.
set -e
qtool quantize "$1" -o "$2" --scheme "${3:-nf4}" ${4:+--data "$4" --samples 128}
qtool verify "$2" --source "$1"
