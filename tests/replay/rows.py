"""Rows of a small study: two memories, three delays, three questions."""

from dataclasses import replace

from protokv.replay.rows import AnswerRow

ROW = AnswerRow(
    video="a",
    question_id="1",
    question="What?",
    type="colour",
    expected="red",
    reference="evidence",
    reference_s=3.0,
    delay_s=0.0,
    asked_s=3.0,
    memory="full",
    budget=64,
    config={"kind": "full"},
    prediction="red",
    correct=True,
    ttft_ms=2.0,
    total_ms=5.0,
    context_tokens=64,
    state_bytes=1000,
    step_ms=10.0,
    tokens_seen=640,
    stream={"fps": 2.0, "fingerprint": "f"},
    model={"name": "m", "weights_digest": "w", "dtype": "float32"},
    device="cpu",
    decoding={"max_new_tokens": 16},
)


def example_rows() -> list[AnswerRow]:
    return [
        replace(
            ROW,
            memory=memory,
            config={"kind": memory},
            delay_s=delay,
            question_id=str(number),
            type=kind,
            expected=answer,
            correct=delay <= right_until,
            ttft_ms=1.0 + number,
            reference="query" if number == 2 else "evidence",
        )
        for memory, right_until in (("full", 120.0), ("window", 0.0))
        for delay in (0.0, 30.0, 120.0)
        for number, (kind, answer) in enumerate(
            [("colour", "red"), ("colour", "blue"), ("first", "ring")]
        )
    ]
