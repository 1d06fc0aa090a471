"""The bank of the default memory: agglomerative (exact), blocked, and quantized to 8 bits.

The blocked rule approximates exact Ward merging in bounded work. On synthetic streams of one head (196 tokens a step,
D = 128, scenes that drift, with moving things and sensor noise), the error as a share of the variance, and the number
of 120 planted rare events that still have a prototype of their own at the end, were:

| prototypes | scenes, as a share of the prototypes | exact | blocked |
|---|---|---|---|
| 1176 | .8 | .0284, 120 | .0287, 120 |
| 588 | .8 | .0339, 120 | .0346, 120 |
| 750 | 1 | .0433, 118 | .0623, 112 |
| 1176 | 1.5 | .117, 119 | .139, 91 |
| 3000 | 1.5 | .0757, 119 | .112, 118 |

While the scenes fit, the two keep the same: tests bound the error at 1.1 times the exact rule's, and at 1.15 times on
noise, from K = 512 on. Where scenes do not fit, the exact rule keeps more.

Both tables were measured with shorter plans, wider searches of small banks and narrower ones of large ones. What is
there now takes half of the time at 77 tokens a step, and was compared with that at 81 tokens a step and D = 64:

| prototypes | scenes | before | now |
|---|---|---|---|
| 750 | 1 | .0385, 468 of 480 | .0389, 466 of 480 |
| 750 | 1.5 | .0595, 640 of 960 | .0629, 518 of 960 |
| 4500 | 2.2, some never seen | .0427, 355 of 360 | .0420, 349 of 360 |

The blocked rule serves from K = 512 on (`BLOCKED_FROM`), where the exact rule becomes too slow. CPU
milliseconds of one layer of 4 heads of 128, one thread of a busy machine, least of five steps, scenes that fit:

| prototypes | 64 | 128 | 256 | 512 | 1024 | 2048 | 3000 | 4096 |
|---|---|---|---|---|---|---|---|---|
| exact, 196 tokens a step | 59 | 66 | 86 | 92 | 125 | 136 | 151 | 180 |
| blocked | 87 | 71 | 60 | 53 | 39 | 48 | 31 | 25 |
| exact, 9 tokens a step | 3.8 | 4.1 | 4.4 | 5.2 | 7.3 | 11 | 19 | |
| blocked | 4.5 | 3.2 | 2.9 | 2.4 | 3.1 | 5.0 | 7.0 | 5.9 |

The exact rule also waits for the device. Below K = 512 it costs about the same as the blocked rule and keeps more, and
the answers of the delay study come from it: on its first world the blocked rule changes 10 of 330 answers.

At 28 layers and 196 tokens, a step with attention takes at most 1,062 operations at a budget of 1k tokens, 726 at 2k,
491 at 4k, 492 at 6k and 494 at 24k, without waits. Centres stay float32: in bfloat16 a mean stops moving after about
500 tokens.
"""
