"""The delayed-query protocol: a stream is watched once, and every question is asked at each delay, under every memory.

Questions and their reference times (`questions`), what is asked when (`schedule`), files and procedural worlds as
streams (`streams`), named sets of memories (`studies`), what is to be done (`plan`), the pass itself (`runner`),
results (`rows`) and what they say (`judge`, `metrics`, `report`, `figure`). Knows nothing of the command line.
"""
