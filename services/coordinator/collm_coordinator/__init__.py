"""Interference-aware batch sizes: latency fits, training goodput, solver (paper section 5)."""
