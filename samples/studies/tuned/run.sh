#!/bin/sh
# Searches settings of InfiniPot-V, and runs the studies with those that were found, into the folder of the first argument
# (default: ./again): about 25 minutes of one CPU core for the search and as much for the studies. The same command
# continues an interrupted run.
set -eu
studies=$(dirname "$0")/..
out=${1:-again}
mkdir -p "$out"
replay() {
  protokv replay --memory infinipot-v --json -q "$@" > /dev/null
}
delay() {
  replay --length 7m --evidence 16s --before 0 --per-type 3 --distractor-rate 20 --cuts 6:20 "$@"
}
# The search: worlds that no table uses. The first part finds two settings, the second the third.
search() {
  part=$1
  shift
  delay --world 7000000:8 --delays 2m,400s --budget 151,38 --batched 8 -o "$out/search-delay-$part.jsonl" "$@"
  replay --world 7001000:8 --length 8m --evidence 16s --per-type 3 --distractor-rate 20 --distractor-similarity 0.5 \
    --cuts 6:20 --delays 60,220 --budget 173,43 --batched 8 -o "$out/search-harder-$part.jsonl" "$@"
}
search 1 --set kept_share=0.75,0.9,0.95 --set redundancy_share=0.5,0.75,1
search 2 --set redundancy_share=1 --set kept_share=0.95,0.98 --set recent_share=0.05,0.125,0.5
# The studies, on their own worlds.
set -- --set redundancy_share=1 --set kept_share=0.95 --set recent_share=0.125
delay --world 5000000:16 --delays 0,30s,2m,5m,400s --budget 151,75,38 --batched 16 -o "$out/delay.jsonl" "$@"
replay --study "$studies/harder.toml" --budget 173,43,22,11 --batched 32 -o "$out/harder.jsonl" "$@"
replay --study "$studies/harder.toml" --backdrop natural --world 5002500:16 --budget 173,43,22 --batched 16 \
  -o "$out/natural.jsonl" "$@"
replay --study "$studies/order.toml" --batched 32 -o "$out/order.jsonl" "$@"
replay --study "$studies/time.toml" --budget 173,43,22,11 --batched 24 -o "$out/time.jsonl" "$@"
