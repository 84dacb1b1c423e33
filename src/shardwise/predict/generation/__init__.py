"""What generation will take under every strategy: traffic of a turn, memory, time of a token (docs/generation.md).

`turns` and `volume` say what moves, `fit` what is held, `timing` how long it takes; `comparison` puts strategies side
by side, `search` finds the best ones. Nothing is imported here, since what is held and moved needs no numpy.
"""
