"""The demo: a help-desk corpus, a bursty script, a recorder and its report."""
