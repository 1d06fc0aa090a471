#!/bin/sh
# Makes the rows and figures again, into the folder of the first argument (default: ./again): about two hours of one CPU
# core. The same command continues an interrupted run. Each part first says how long it will take.
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
out=${1:-again}
mkdir -p "$out"
worlds() {
  PYTHONPATH="$root" python -m samples.worlds "$@"
}
replay() {
  set -- "$@" --length 7m --evidence 16s --before 0 --per-type 3 --worlds 5000000:16
  worlds "$@" --dry-run
  worlds "$@" --json > /dev/null
}
sweep=0,30s,2m,5m,400s
for level in low high; do
  if [ $level = low ]; then distraction="--distractor-rate 2 --cuts none"; else distraction="--distractor-rate 20 --cuts 6:20"; fi
  # shellcheck disable=SC2086
  replay quick $distraction --delays $sweep --memory full,last-frames --budget 151 -o "$out/$level.jsonl"
  # shellcheck disable=SC2086
  replay quick $distraction --delays $sweep --budget 151,75,38 -o "$out/$level.jsonl" \
    --memory durable,continuity,paper,infinipot-v,rekv,dycoke,sliding-window,first-tokens,random
  worlds --report "$out/$level.jsonl" --csv "$out/$level.csv"
  # One budget a figure.
  grep -E '"memory": ?"full"|"budget": ?38,' "$out/$level.jsonl" > "$out/$level-38.jsonl"
  worlds --report "$out/$level-38.jsonl" --plot "$out/$level.png" > /dev/null
done
replay ablation --distractor-rate 20 --cuts 6:20 --delays 0,30s,90s,400s --budget 151 \
  -o "$out/ablation.jsonl"
worlds quick --worlds 5000016:4 --length 380s --before 2m --evidence 16s --per-type 3 --distractor-rate 20 --cuts 6:20 \
  --delays 240s --memory durable,continuity,first-tokens,random --budget 150,76,38 \
  --json -o "$out/middle.jsonl" > /dev/null
