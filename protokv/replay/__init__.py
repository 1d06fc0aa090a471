"""The delayed-query protocol: a stream is watched once, and every question is asked at each delay, under every memory.

One file a part: questions and their reference times (`questions`), what is asked when (`schedule`), streams out of
files and procedural worlds (`streams`), the pass itself (`runner`),
and what comes of it (`metrics`, `report`, `figure`).
Nothing in here knows the command line.
"""
