"""A full mailbox drops its oldest item or makes the sender wait, news always arrives, and pauses double."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.ingestion.live.reader import Backoff, Mailbox

SENT = st.lists(st.sampled_from(["frame", "news", "take"]), max_size=60)


@given(SENT, st.integers(1, 5))
def test_the_oldest_frame_is_dropped_and_news_never(actions, room):
    mailbox: Mailbox[tuple[str, int]] = Mailbox(room, wait=False)
    model: list[tuple[str, int]] = []
    dropped = 0
    for i, action in enumerate(actions):
        if action == "take":
            assert mailbox.get(0.0) == (model.pop(0) if model else None)
        elif action == "news":
            mailbox.tell((action, i))
            model.append((action, i))
        else:
            mailbox.put((action, i))
            held = [one for one in model if one[0] == "frame"]
            if len(held) == room:
                model.remove(held[0])
                dropped += 1
            model.append((action, i))
        assert mailbox.dropped == dropped
    assert [mailbox.get(0.0) for _ in model] == model


def test_a_waiting_sender_goes_on_when_there_is_room_and_when_the_mailbox_closes():
    mailbox: Mailbox[int] = Mailbox(2, wait=True)
    thread = threading.Thread(target=lambda: [mailbox.put(i) for i in range(6)], daemon=True)
    thread.start()
    assert [mailbox.get(20.0) for _ in range(3)] == [0, 1, 2]
    mailbox.close()
    thread.join(20.0)
    assert not thread.is_alive()
    assert mailbox.dropped == 0


@pytest.mark.parametrize(("draw", "part"), [(0.0, 0.5), (1.0, 1.0), (0.5, 0.75)])
def test_pauses_double_up_to_the_longest_and_begin_anew(draw, part):
    backoff = Backoff(1.0, 10.0, lambda: draw)
    assert [backoff.next_s() for _ in range(6)] == [n * part for n in (1, 2, 4, 8, 10, 10)]
    backoff.reset()
    assert backoff.next_s() == part
