"""The command line: one module per command, each importing what it runs only when it runs."""
