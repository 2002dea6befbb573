"""What every CoLLM service shares: nouns, messages, keys, streams, registry, settings, errors."""
