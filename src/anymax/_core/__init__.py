"""The foundation of every verb: the contract of a map, the names of maps, shared options, rows and axes."""
