"""The toy world of the embedded models, studies of memories on it, and the language study. Not part
of the wheel.

`world` draws videos of shapes whose events are known; `questions` and `phrases` ask about them;
`streams` makes them the streams of a replay, and `studies` reads which memories are compared on
them. `language` compares memories on a text, with the Llama of `llama`. `python -m samples.worlds
STUDY` runs a study.
"""
