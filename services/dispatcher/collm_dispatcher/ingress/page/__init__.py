"""The live page: the cell at a glance, as plain data over server-sent events, and the files that draw it."""
