"""The inference engine. `protocol` and `fake` need no torch; `engine` has the real one."""
