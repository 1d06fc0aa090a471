"""The blocked rule: Ward's merges planned in blocks, in bounded, fixed work (`rule`).

How near it comes to exact Ward on synthetic streams of one head (196 tokens a step, D = 128; SSE as a share of the
variance, and how many of 120 planted tokens of rare events still have a prototype of their own at the end; scenes
that drift, with things that move and sensor noise):

| prototypes | scenes, as a share of the prototypes | exact | blocked |
|---|---|---|---|
| 1176 | .8 | .0284, 120 | .0287, 120 |
| 588 | .8 | .0339, 120 | .0346, 120 |
| 750 | 1 | .0433, 118 | .0623, 112 |
| 1176 | 1.5 | .117, 119 | .139, 91 |
| 3000 | 1.5 | .0757, 119 | .112, 118 |

So it keeps what the exact rule keeps while the scenes fit: in tests the error is at most 1.1 times the exact rule's,
1.01 as measured, and at most 1.15 times on noise, from K = 512 on and at 9 to 196 tokens a step. Where they do not
fit the exact one keeps more, the more so the fewer steps the bank has room for.

It serves from K = 512 on (`DurableConfig.blocked_from`) since that is where the exact rule stops being affordable.
CPU milliseconds of one layer of 4 heads of 128, one thread of a busy machine, least of five steps, scenes that fit:

| prototypes | 64 | 128 | 256 | 512 | 1024 | 2048 | 3000 | 4096 |
|---|---|---|---|---|---|---|---|---|
| exact, 196 tokens a step | 59 | 66 | 86 | 92 | 125 | 136 | 151 | 180 |
| blocked | 87 | 71 | 60 | 53 | 39 | 48 | 31 | 25 |
| exact, 9 tokens a step | 3.8 | 4.1 | 4.4 | 5.2 | 7.3 | 11 | 19 | |
| blocked | 4.5 | 3.2 | 2.9 | 2.4 | 3.1 | 5.0 | 7.0 | 5.9 |

On noise, where no merge is cheaper than others, the exact rule takes 160 to 380 at 196 tokens and K = 512 to 4096. It
also waits for the device. Below K = 512 it costs about what the blocked one does, and keeps more; the embedded model
at its own budget (K = 384) has it, and so has every budget of the delay study.

A bank of few steps plans several times in each. At 28 layers and 196 tokens, a whole step with attention is 792
operations at a budget of 1k tokens, 532 at 2k and at most 400 from 4k on, and waits for nothing at any.

An earlier form of this rule, in blocks of 64, lost little in that study either (6 other worlds, high pressure, 400 s
after the evidence; 90 content and 42 order questions a figure): 1.00 / .86, .99 / .86 and .98 / .79 with 38, 75 and
151 tokens, the exact one 1.00 / .83, 1.00 / .83 and .97 / .83. Centres rounded to bfloat16 after every step have 1.00
/ .83, 1.00 / .81 and .97 / .83 under the exact rule. They stay float32: a mean in bfloat16 no longer moves once some
500 tokens are in it, and no stream of that study is so long.
"""
