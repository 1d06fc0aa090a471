#!/bin/sh
# The rows again, into the folder named as the first argument (default: ./again): about 11 minutes of CPU time for
# `harder`, 4 before natural backdrops, 7 for centres of 32 bits, 3 for `decay`, 14 for `order`, 20 for `time`,
# at most 22 for `hour`, 15 for its middle, 6 for the full cache over an hour, and 9 for `modes`. A run goes on where it was
# stopped, and how long it will take is measured, one stream at a time, and said before it begins.
set -eu
out=${1:-again}
mkdir -p "$out"
replay() {
  protokv replay "$@" --dry-run >&2
  protokv replay "$@" --json -q > /dev/null
}
replay --study harder --batched 24 -o "$out/harder.jsonl"
replay --study harder --backdrop natural --world 5002500:16 --budget 173,43,22 \
  --memory full,durable,infinipot-v,sliding-window --batched 16 -o "$out/natural.jsonl"
replay --study harder --memory durable --set center_bits=32 --batched 24 -o "$out/bits.jsonl"
replay --study harder --backdrop natural --world 5002500:16 --budget 173,43,22 --memory durable --set center_bits=32 \
  --batched 16 -o "$out/bits-natural.jsonl"
replay --study decay --batched 4 -o "$out/decay.jsonl"
replay --study hour --batched 4 -o "$out/hour.jsonl"
replay --study hour --before 30m --delays 0,10m,28m --batched 4 -o "$out/hour-middle.jsonl"
replay --study hour --memory full --batched 4 -o "$out/hour-full.jsonl"
replay --study order --batched 16 -o "$out/order.jsonl"
replay --study time --batched 8 -o "$out/time.jsonl"
replay --study modes --batched 8 -o "$out/modes.jsonl"
protokv replay --report "$out/harder.jsonl" --format table
