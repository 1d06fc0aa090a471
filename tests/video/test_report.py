"""The arithmetic of the account of one reading."""

from __future__ import annotations

from protokv.video.report import DecodeReport


def test_a_frame_that_stays_away_is_lost_once_a_later_one_is_shown():
    report = DecodeReport()
    for time_s in (0.0, 0.2, 0.1, 0.3):
        report.sent(time_s)
    assert [report.shown(t) for t in (0.0, 0.2)] == [True, True]
    assert (report.damage.frames_lost, report.damage.lost_from_s) == (1, 0.1)
    report.finish()
    assert report.damage.frames_lost == 2
    assert report.damage.message == "2 frames could not be decoded, first at 0.10 s"


def test_a_frame_that_comes_out_of_order_is_not_given_and_counts_once():
    report = DecodeReport()
    report.sent(0.0)
    report.sent(0.1)
    assert report.shown(0.1)
    assert not report.shown(0.0)
    report.finish()
    assert report.damage.frames_lost == 1


def test_what_lies_before_the_start_does_not_count():
    report = DecodeReport(1.0)
    report.sent(0.5)
    report.failed(0.5, "rubbish")
    report.shown(0.7, corrupt=True)
    report.finish()
    assert report.damage.ok


def test_one_frame_is_spoken_of_in_the_singular():
    report = DecodeReport()
    report.missing(1, 2.0, "cut")
    report.shown(2.5, corrupt=True)
    assert report.damage.message == "1 frame could not be decoded and 1 frame is damaged, first at 2.00 s (cut)"
    assert report.damage.to_dict()["ok"] is False
