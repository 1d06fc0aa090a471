"""How alerts are judged, and that the code of others runs from its files with stand-ins for the
rest. The count itself needs that code, so it is run by hand.
"""

import sys
from pathlib import Path

import pytest

from samples.clients.count import COUNTS, judge_alert
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
