"""The command line, one file a subcommand. Heavy imports wait until a command runs."""
