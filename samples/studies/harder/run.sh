#!/bin/sh
# Makes the rows again, into the folder of the first argument (default: ./again): about 11 minutes of CPU time for
# `harder`, 4 for natural backdrops, 7 for centres of 32 bits, 3 for `decay`, 14 for `order`, 20 for `time`, at most 22
# for `hour`, 15 for its middle, 6 for the full cache over an hour, and 9 for `modes`. The same command continues an
# interrupted run. Each part first says how long it will take.
set -eu
studies=$(dirname "$0")/..
out=${1:-again}
mkdir -p "$out"
replay() {
  protokv replay "$@" --dry-run >&2
  protokv replay "$@" --json -q > /dev/null
}
replay --study "$studies/harder.toml" -o "$out/harder.jsonl"
replay --study "$studies/harder.toml" --backdrop natural --world 5002500:16 --budget 173,43,22 \
  --memory full,durable,infinipot-v,sliding-window -o "$out/natural.jsonl"
replay --study "$studies/harder.toml" --memory durable --set center_bits=32 -o "$out/bits.jsonl"
replay --study "$studies/harder.toml" --backdrop natural --world 5002500:16 --budget 173,43,22 --memory durable \
  --set center_bits=32 -o "$out/bits-natural.jsonl"
replay --study "$studies/decay.toml" -o "$out/decay.jsonl"
replay --study "$studies/hour.toml" -o "$out/hour.jsonl"
replay --study "$studies/hour.toml" --before 30m --delays 0,10m,28m -o "$out/hour-middle.jsonl"
replay --study "$studies/hour.toml" --memory full -o "$out/hour-full.jsonl"
replay --study "$studies/order.toml" -o "$out/order.jsonl"
replay --study "$studies/time.toml" -o "$out/time.jsonl"
replay --study "$studies/modes.toml" -o "$out/modes.jsonl"
protokv replay --report "$out/harder.jsonl" --format table
