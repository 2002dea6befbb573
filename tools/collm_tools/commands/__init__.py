"""One file for each subcommand of `collm`."""
