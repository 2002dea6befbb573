"""The `collm` command and the libraries behind it; nothing here imports torch."""
