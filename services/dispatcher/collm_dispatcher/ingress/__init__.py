"""HTTP in, streams out: what clients see of CoLLM."""
