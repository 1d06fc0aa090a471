#!/bin/sh
# Every sample video into a state of at most 512 visual tokens, and its questions answered from that state alone.
# The states go to the folder named as the first argument, or to a temporary one.
set -eu
cd "$(dirname "$0")"
out=${1:-$(mktemp -d)}
for name in short minute long; do
  echo "== $name" >&2
  protokv ingest "$name/video.mp4" -o "$out/$name.safetensors" --budget 512 --format table
  protokv query "$out/$name.safetensors" - < "$name/questions.jsonl" --format table
done
echo "states: $out" >&2
