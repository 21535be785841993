"""Says whether a version is better: suites, statistics, the gate and its report.

May import `serve` and `memory`. Measures through a worker, as a client would; never trains.
"""
