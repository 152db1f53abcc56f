"""The command ``perfsuite`` with its subcommands."""
