"""How alerts are judged, and that the code of others runs from its files with stand-ins for the
rest. The count itself needs that code, so it is run by hand.
"""

import importlib
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from samples.clients import foreign
from samples.clients.count import COUNTS, count_rows, judge_alert
from samples.clients.foreign import FILES, import_foreign


@pytest.mark.parametrize(
    ("starts_s", "alerted_s", "verdict"),
    [
        ([5.0, 60.0, 90.0], 63, "right"),
        ([5.0, 60.0], 60, "false"),
        ([5.0, 60.0], 71, "late"),
        ([5.0, 60.0], 0, "missed"),
        ([5.0], 9, "false"),
        ([5.0], 0, "quiet"),
    ],
)
def test_an_alert_is_right_when_the_shape_has_just_come_back(
    starts_s: list[float], alerted_s: int, verdict: str
) -> None:
    assert judge_alert(starts_s, alerted_s) == verdict


def test_an_alert_is_more_than_one_appearance() -> None:
    assert [one["condition_met"] for one in COUNTS] == [False, True, True, True]


def test_what_a_session_says_of_a_return_is_counted() -> None:
    row = {
        "seen": {"star": [5.0, 60.0], "bar": [9.0]},
        "shape": "star",
        "alerted_s": 62,
        "llm_vision": {"star": "two", "bar": "two"},
        "when": {
            "star": {"moment_s": 65.0, "evidence_s": [5.0, 75.0]},
            "bar": {"moment_s": None, "evidence_s": []},
        },
    }
    counts = count_rows([row, row | {"alerted_s": 0, "when": {}}])
    assert counts["right"] == "1 of 2 (0.09 to 0.91)"
    assert counts["missed"] == counts["right"]
    assert counts["counted right"].startswith("2 of 4")
    assert counts["its moment within 10 s"].startswith("1 of 1")
    assert counts["evidence within 10 s"].startswith("0 of 1")
    assert counts["no moment, as it never came back"].startswith("1 of 1")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a server on loopback, from which files are fetched."""
    folder = tmp_path / "host"
    folder.mkdir()
    serve = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
        monkeypatch.setattr(foreign, "HOST", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder
        server.shutdown()
        thread.join()


def test_files_are_fetched_once_from_the_commits_that_were_tried(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for project, paths in FILES.items():
        assert re.fullmatch(r"[\w-]+/[\w-]+/[0-9a-f]{40}", project)
        for path in paths:
            (host / project / path).parent.mkdir(parents=True, exist_ok=True)
            (host / project / path).write_text(path)
    code = tmp_path / "code"
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for _ in range(2):
        assert import_foreign(code, "frigate.jobs.job") == "frigate.jobs.job"
        shutil.rmtree(host, ignore_errors=True)
    found = {str(one.relative_to(code)): one.read_text() for one in code.rglob("*.py")}
    assert found == {path: path for paths in FILES.values() for path in paths}


def test_code_of_others_runs_from_its_files_and_beside_stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for path in (path for paths in FILES.values() for path in paths):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    job = tmp_path / "frigate/jobs/job.py"
    job.write_text("from frigate.comms.bus import Bus\nimport cv3_absent as _\n")
    with pytest.raises(ModuleNotFoundError, match="cv3_absent"):
        import_foreign(tmp_path, "frigate.jobs.job")
    job.write_text("from frigate.comms.bus import Bus\nsent = Bus().send(3)\n")
    found = import_foreign(tmp_path, "frigate.jobs.job")
    assert found.__file__ == str(job)
    assert found.sent is found.Bus.return_value.send.return_value
    for name in [one for one in sys.modules if one.partition(".")[0] == "frigate"]:
        monkeypatch.delitem(sys.modules, name)
