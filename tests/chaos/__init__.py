"""
Real workers under real faults, for minutes: ``make chaos``.

`run` starts lock servers, workers and a sender, and does something bad every few seconds; `app` has
the tasks, which write down what they believe; `judge` says what of that must not be.
"""
