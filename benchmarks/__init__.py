"""Peers beside us in one run: `python -m benchmarks` measures on this machine, `python -m benchmarks readme` shows it.

An absolute figure holds for one machine only, so what the tables claim is ratios measured in one run.
"""
