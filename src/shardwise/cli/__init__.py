"""The command line: one thin file a command, each importing only what it needs."""
