"""What `collm status` shows: read from the broker and the HTTP service, then drawn."""
