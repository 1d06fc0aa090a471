#!/bin/sh
# The rows again, into the folder named as the first argument (default: ./again): about 11 minutes of CPU time for
# `harder`, 3 for `decay`, 7 for 16 of the 32 worlds of `order`, and 9 for `modes`. A run goes on where it was stopped, and
# how long it will take is measured, one stream at a time, and said before it begins.
set -eu
out=${1:-again}
mkdir -p "$out"
replay() {
  protokv replay "$@" --dry-run >&2
  protokv replay "$@" --json -q > /dev/null
}
replay --study harder --side-by-side 24 -o "$out/harder.jsonl"
replay --study decay --side-by-side 4 -o "$out/decay.jsonl"
replay --study order --world 5002400:16 --side-by-side 16 -o "$out/order.jsonl"
replay --study modes --side-by-side 8 -o "$out/modes.jsonl"
protokv replay --report "$out/harder.jsonl" --format table
