"""What every verb stands on: the contract of a map, its names, the options that verbs share, rows and axes."""
