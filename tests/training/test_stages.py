"""The journal and the files of a run."""

from __future__ import annotations

import json

import torch

from samples.training.stages import Journal, save_atomically


def test_the_journal_adds_lines_and_files_appear_whole(tmp_path):
    say = Journal(tmp_path)
    say({"a": 1})
    say({"b": 2})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [("a" in r, "b" in r, "wall_s" in r) for r in lines] == [(True, False, True), (False, True, True)]
    save_atomically({"x": torch.arange(3)}, tmp_path / "x.safetensors")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["log.jsonl", "x.safetensors"]
