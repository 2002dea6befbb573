"""One replica: a supervisor, an inference process and a fine-tuning process over one copy of the weights."""
