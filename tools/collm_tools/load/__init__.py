"""The load generator: arrivals, prompts, one request, what it all adds up to."""
