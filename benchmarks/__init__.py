"""Speed, as ratios within one interleaved run. Never in a timed test: machines are shared and noisy."""
