#!/bin/sh
# The rows again, into the folder named as the first argument (default: ./again): about 8 minutes of CPU time for 8 of the
# 32 worlds of `harder` and 2 of the 4 of `decay`, and 9 for `modes`; leave out --world for all. A run goes on where it was
# stopped, and how long it will take is measured, one stream at a time, and said before it begins.
set -eu
out=${1:-again}
mkdir -p "$out"
replay() {
  protokv replay "$@" --dry-run >&2
  protokv replay "$@" --json -q > /dev/null
}
replay --study harder --world 5002000:8 --side-by-side 8 -o "$out/harder.jsonl"
replay --study decay --world 5002200:2 --budget 432 --side-by-side 2 -o "$out/decay.jsonl"
replay --study modes --side-by-side 8 -o "$out/modes.jsonl"
protokv replay --report "$out/harder.jsonl" --format table
